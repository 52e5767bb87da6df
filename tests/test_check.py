"""`trl-opd check`: what it finds on prepared cases, and that it can be run as a user runs it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import datasets
import pytest
import torch
from rich.console import Console

from trl_opd import cli
from trl_opd.check import check, print_findings

from .helpers import CHAT_TEMPLATE, lora, make_dataset, make_model, make_tokenizer, make_trainer, save_model, weights

OTHER_TEMPLATE = CHAT_TEMPLATE.replace("{{ 'a ' }}", "{{ 'b b b ' }}")


def conversations(number: int) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(number)])


def printed(trainer: Any, **more: Any) -> str:
    console = Console(record=True, width=400, file=io.StringIO())
    print_findings(trainer, check(trainer, **more), console)
    return console.export_text()


def test_nothing_is_trained_and_all_is_as_before(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=make_dataset(40), peft_config=lora(init_lora_weights=False))
    before, mode = weights(trainer.model), trainer.model.training
    (finding,) = check(trainer, 6)
    assert finding.comparison.completions == 6
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.model.training == mode and trainer.state.global_step == 0


def test_overlap_by_hand(tmp_path: Path) -> None:
    """Of the 16 likeliest tokens at each action token of the teacher and the student."""
    trainer = make_trainer(tmp_path)
    student, teacher = trainer.student(), trainer.teacher.model
    seen: list[Any] = []
    score = trainer.score_with_teacher
    trainer.score_with_teacher = lambda rollout: (seen.append(rollout), score(rollout))[1]
    (finding,) = check(trainer, 4)
    shares = []
    for row, ids in enumerate(seen[0].ids_BT):
        for t in seen[0].mask_BT[row].nonzero().flatten().tolist():
            tops = [set(model(ids[None, :t]).logits[0, -1, :43].topk(16).indices.tolist()) for model in (student, teacher)]
            shares.append(len(tops[0] & tops[1]) / 16)
    assert finding.overlap == pytest.approx(sum(shares) / len(shares), abs=1e-5)
    assert finding.overlap is not None and 0 < finding.overlap < 1


def test_a_teacher_that_is_the_student(tmp_path: Path) -> None:
    text = printed(make_trainer(tmp_path, teacher_model=make_model(0)))
    assert "the teacher scores as the student does" in text
    assert "100%" in text


def test_prompts_that_the_teachers_own_template_renders_otherwise(tmp_path: Path) -> None:
    """Side by side, and said first."""
    tokenizer = make_tokenizer(chat=True)
    theirs = make_tokenizer(chat=True)
    theirs.chat_template = OTHER_TEMPLATE
    teacher = save_model(tmp_path / "teacher", make_model(1), theirs)
    trainer = make_trainer(tmp_path, teacher_model=teacher, train_dataset=conversations(8), processing_class=tokenizer)
    (finding,) = check(trainer, 2)
    mine, theirs = ("".join(prompt.split()) for prompt in finding.prompts[0])
    assert mine.endswith("a") and theirs == mine.removesuffix("a") + "bbb"
    assert "chat template renders these prompts otherwise" in finding.verdicts[0]
    text = printed(trainer, num_prompts=2)
    assert "the student reads" in text
    same = save_model(tmp_path / "same", make_model(1), tokenizer)
    trainer = make_trainer(tmp_path, teacher_model=same, train_dataset=conversations(8), processing_class=tokenizer)
    (finding,) = check(trainer, 2)
    assert not finding.prompts and not finding.verdicts


def test_a_prompt_of_the_teachers_own_is_shown(tmp_path: Path) -> None:
    """Privileged context is meant: no verdict."""
    data = make_dataset(8, teacher_prompt=[f"{i} is it " for i in range(8)])
    (finding,) = check(make_trainer(tmp_path, train_dataset=data), 4)
    assert len(finding.prompts) == 4
    pairs = [("".join(mine.split()), "".join(theirs.split())) for mine, theirs in finding.prompts]
    assert all(mine.endswith("=") and theirs.endswith("isit") for mine, theirs in pairs)
    assert finding.verdicts == []
    assert finding.overlap is not None


def test_each_teacher_has_a_column(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", make_model(0))
    untrained = make_model(2)
    torch.nn.init.zeros_(cast(Any, untrained).lm_head.weight)
    trainer = make_trainer(
        tmp_path,
        model=base,
        peft_config=lora(),
        train_dataset={"same": make_dataset(64), "blank": make_dataset(64)},
        teacher_model={"same": "base", "blank": untrained},
        max_completion_length=12,
        per_device_train_batch_size=16,
    )
    text = printed(trainer, num_prompts=64)
    assert "Teacher 'same': teacher_kl is" in text
    assert "Teacher 'blank': The teacher's mean log-prob is -3.8, no better than guessing among 43 ids" in text.replace(
        "\n", " "
    )


def test_a_tokenizer_of_other_ids_cannot_work(tmp_path: Path) -> None:
    """An error, as at the start of training."""
    theirs = make_tokenizer()
    vocab = theirs.get_vocab()
    swapped = {token: {vocab["a"]: vocab["b"], vocab["b"]: vocab["a"]}.get(i, i) for token, i in vocab.items()}
    from tokenizers import models, pre_tokenizers

    theirs.backend_tokenizer.model = models.WordLevel(swapped, unk_token="<unk>")
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    teacher = save_model(tmp_path / "teacher", make_model(1), theirs)
    with pytest.raises(ValueError, match=r"different tokenizers: 2 ids differ"):
        make_trainer(tmp_path, teacher_model=teacher)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = save_model(tmp_path / "student", make_model(0)), save_model(tmp_path / "teacher", make_model(1))
    make_dataset(32).to_json(tmp_path / "data" / "train.jsonl")
    arguments = [
        "--model_name_or_path",
        student,
        "--teacher_model_name_or_path",
        teacher,
        "--output_dir",
        str(tmp_path / "out"),
    ]
    arguments += [
        "--dataset_name",
        str(tmp_path / "data"),
        "--max_completion_length",
        "8",
        "--use_cpu",
        "--check_prompts",
        "4",
    ]
    assert cli.main(["check", *arguments, "--per_device_train_batch_size", "4"]) == 0
    text = capsys.readouterr().out
    assert "top-16 overlap" in text and "Nothing looks wrong." in text


def test_the_program_tells_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and cli.main([]) == 0
    assert "check    student and teacher compared" in capsys.readouterr().out
