"""The teacher's own prompt: what it reads, id by id, and where its scores land."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from trl_opd.batch import Completion, Rollout
from trl_opd.config import as_dict
from trl_opd.teacher_prompts import TeacherPromptEncoder
from trl_opd.teachers import ModelTeacher

from .helpers import CHAT_TEMPLATE, make_config, make_dataset, make_model, make_tokenizer, make_trainer
from .test_errors import assert_error

TEACHERS_TEMPLATE = "{% for m in messages %}{{ m['content'] + '=' }}{% endfor %}{{ '+' if add_generation_prompt else '' }}"
# the tokenizer's ids: 4 to 13 are the digits, 14 is +, 15 is =, 16 the space, 17 to 42 are a to z
DIGIT, PLUS, EQUALS, SPACE, A = 4, 14, 15, 16, 17


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def encoder(folder: Path, *, chat: bool = True, **settings: Any) -> TeacherPromptEncoder:
    config = make_config(folder, **settings)
    return TeacherPromptEncoder(make_tokenizer(chat=chat), config, as_dict(config.chat_template_kwargs))


# ---- What it reads


def test_own_template_by_hand(tmp_path: Path) -> None:
    """The student reads "u 1 a ", the teacher "1=+"."""
    own = encoder(tmp_path, teacher_chat_template=TEACHERS_TEMPLATE)
    rows: list[dict[str, Any]] = [{"prompt": [user("1")]}, {"prompt": [user("2"), user("b")]}]
    assert own.encode_rows(rows, [[], []]) == [
        [DIGIT + 1, EQUALS, PLUS],
        [DIGIT + 2, EQUALS, A + 1, EQUALS, PLUS],
    ]
    assert encoder(tmp_path, chat=False, teacher_chat_template=TEACHERS_TEMPLATE).encode_row(rows[0]) == [
        DIGIT + 1,
        EQUALS,
        PLUS,
    ], "the student's tokenizer needs no template for that"


def test_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEACHERS_TEMPLATE)
    own = encoder(tmp_path, teacher_chat_template=str(tmp_path / "template.jinja"))
    assert own.encode_row({"prompt": [user("1")]}) == [DIGIT + 1, EQUALS, PLUS]
    assert_error(lambda: make_config(tmp_path, teacher_chat_template="no/such.jinja"), "no/such.jinja", "neither Jinja text")


def test_system_message_is_put_before_or_in_place(tmp_path: Path) -> None:
    """By hand: "s 9 u 1 a "."""
    own = encoder(tmp_path, teacher_system_prompt="9")
    letter = {name: A + ord(name) - ord("a") for name in "sua"}
    expected = [letter["s"], SPACE, DIGIT + 9, SPACE, letter["u"], SPACE, DIGIT + 1, SPACE, letter["a"], SPACE]
    assert own.encode_row({"prompt": [user("1")]}) == expected
    assert own.encode_row({"prompt": [system("be brief"), user("1")]}) == expected
    prompt = [user("1")]
    own.encode_row({"prompt": prompt})
    assert prompt == [user("1")], "the row belongs to the dataset"


def test_both_and_a_teacher_prompt_column(tmp_path: Path) -> None:
    own = encoder(tmp_path, teacher_system_prompt="9", teacher_chat_template=TEACHERS_TEMPLATE)
    row = {"prompt": [user("1")], "teacher_prompt": [user("1"), user("2")]}
    assert own.encode_row(row) == [DIGIT + 9, EQUALS, DIGIT + 1, EQUALS, DIGIT + 2, EQUALS, PLUS]


def test_rows_without_a_prompt_of_their_own_are_read_as_the_student_reads_them(tmp_path: Path) -> None:
    own = encoder(tmp_path)
    rows: list[dict[str, Any]] = [{"prompt": "1", "teacher_prompt": "12"}, {"prompt": "1+1", "teacher_prompt": None}]
    assert own.encode_rows(rows, [[7], [8]]) == [[DIGIT + 1, DIGIT + 2], [8]]
    assert own.encode_rows(rows[1:], [[8]]) is None
    assert own.encode_rows([{"prompt": "1"}], [[8]]) is None


def test_plain_text_prompts_have_no_place_for_it(tmp_path: Path) -> None:
    tells = "plain text", "'teacher_prompt' column"
    assert_error(lambda: make_trainer(tmp_path, teacher_system_prompt="9"), *tells)
    assert_error(lambda: make_trainer(tmp_path, teacher_chat_template=TEACHERS_TEMPLATE), *tells)
    data = {"x": make_dataset(8), "y": datasets.Dataset.from_list([{"prompt": [user("1")]}] * 8)}
    tokenizer = make_tokenizer(chat=True)
    assert_error(
        lambda: make_trainer(tmp_path, train_dataset=data, processing_class=tokenizer, teacher_system_prompt="9"), "plain text"
    )


# ---- Where the scores land


def by_hand(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Log-probs of a completion after a prompt, one forward pass for each token."""
    found = []
    for t, token in enumerate(completion):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion[:t]])).logits[0, -1]
        found.append(float(logits.log_softmax(dim=-1)[token]))
    return found


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_after_prompts_of_other_lengths_by_hand(batch_size: int) -> None:
    """Prompts of 3, 1 and 2 tokens to the student, of 1, 6 and 2 to the teacher; completions of 2, 4 and 1."""
    prompts = [[5, 6, 7], [8], [9, 10]]
    theirs = [[20], [21, 22, 23, 24, 25, 26], [9, 10]]
    completions = [[30, 1], [31, 32, 33, 34], [35]]
    built = Rollout.build(
        prompts,
        [Completion(ids, [-1.0] * len(ids), stopped=True) for ids in completions],
        [{"prompt": "a"}] * 3,
        pad_id=0,
        device=torch.device("cpu"),
        teacher_prompts=theirs,
    )
    model = make_model(1)
    scores_BT = ModelTeacher(model, temperature=1.0, vocab_size=43, batch_size=batch_size).score(built)
    for row, (own, seen, ids) in enumerate(zip(prompts, theirs, completions, strict=True)):
        found = scores_BT[row, len(own) : len(own) + len(ids)].tolist()
        assert found == pytest.approx(by_hand(model, seen, ids), abs=1e-5)
        assert found != pytest.approx(by_hand(model, own, ids), abs=1e-3) or own == seen


def test_scores_of_several_turns_by_hand() -> None:
    """What a tool wrote between two turns is read, in its place, but no action: the mask has a gap."""
    prompt, theirs = [5, 6, 7], [20, 21, 22, 23, 24]
    turns = [[30, 31], [40, 41, 42], [32, 1]]  # sampled, the tool's, sampled
    ids = [token for turn in turns for token in turn]
    built = Rollout.build(
        [prompt],
        [Completion(ids, [-1.0] * len(ids), stopped=True)],
        [{"prompt": "a"}],
        pad_id=0,
        device=torch.device("cpu"),
        teacher_prompts=[theirs],
    )
    mask = [False] * 3 + [True, True] + [False] * 3 + [True, True]
    rollout = replace(built, mask_BT=torch.tensor([mask]))
    model = make_model(1)
    scores_BT = ModelTeacher(model, temperature=1.0, vocab_size=43, batch_size=2).score(rollout)
    expected = by_hand(model, theirs, ids)
    assert scores_BT[rollout.mask_BT].tolist() == pytest.approx([*expected[:2], *expected[5:]], abs=1e-5)
    without_the_tools = by_hand(model, theirs, turns[0] + turns[2])
    assert expected[5:] != pytest.approx(without_the_tools[2:], abs=1e-3)


def test_the_trainer_scores_after_the_teachers_template_and_system_message(tmp_path: Path) -> None:
    """The whole way, from rows to the logged KL: student and teacher each read their own text before the same completion."""
    rows = [{"prompt": [user("a" * (1 + i % 3))]} for i in range(8)]
    teacher = make_model(1)
    trainer = make_trainer(
        tmp_path,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(chat=True),
        teacher_model=teacher,
        teacher_chat_template=TEACHERS_TEMPLATE,
        teacher_system_prompt="9",
        max_steps=1,
    )
    found: list[tuple[Rollout, torch.Tensor]] = []
    inner = trainer.rollout_and_scores

    def spy(*args: Any) -> Any:
        result = inner(*args)
        found.append(result[:2])
        return result

    trainer.rollout_and_scores = spy
    trainer.train()
    rollout, scores_BT = found[0]
    differences = []
    for row, ids in enumerate(rollout.completion_ids()):
        letters = len(rollout.rows[row]["prompt"][0]["content"])
        theirs = [DIGIT + 9, EQUALS, *[A] * letters, EQUALS, PLUS]
        expected = by_hand(teacher, theirs, ids)
        start = int(rollout.prompt_lengths_B[row])
        assert scores_BT[row, start : start + len(ids)].tolist() == pytest.approx(expected, abs=1e-5)
        student = [A + 20, SPACE, *[A] * letters, SPACE, A, SPACE]  # "u aa a "
        assert rollout.ids_BT[row, :start].tolist() == student
        differences += [s - q for s, q in zip(by_hand(make_model(0), student, ids), expected, strict=True)]
    assert trainer.state.log_history[0]["teacher_kl"] == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    assert trainer.processing_class.chat_template == CHAT_TEMPLATE
