"""`trl-opd score`: against log-softmax of each sequence alone, and run as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from trl_opd import cli
from trl_opd import score as scoring
from trl_opd.last_layer import PROBE_TOKENS
from trl_opd.score import encode_completion, score

from .helpers import make_model, make_tokenizer, make_trainer, save_model

ROWS = [
    {"prompt": "12+30=", "completion": "42"},
    {"prompt": "a", "completion": "a longer one than the others"},
    {"prompt": "7+7=", "completion": ""},
    {"prompt": "0+0=", "completion": "000", "stopped": False},
    {"prompt": "12+30=", "completion": "42<eos>", "stopped": True},
]


def by_hand(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Log-softmax over the tokenizer's 43 ids of one sequence, without padding."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + completion])).logits[0, :, :43] / temperature
    logps_TV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
    return logps_TV[torch.arange(len(completion)), torch.tensor(completion)]


def ids(text: str) -> list[int]:
    return make_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_and_order_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Models with more rows than the tokenizer has ids, as Qwen2.5 has; chunks smaller than the data."""
    monkeypatch.setattr(scoring, "CHUNK", 2)
    student, teacher = make_model(0, vocab_size=48), make_model(1, vocab_size=64)
    trainer = make_trainer(tmp_path, model=student, teacher_model=teacher, temperature=temperature)
    records = score(trainer, ROWS)
    stop = make_tokenizer().eos_token_id
    expected = [[*ids("42"), stop], [*ids("a longer one than the others"), stop], [stop], ids("000"), [*ids("42"), stop]]
    assert [record["ids"] for record in records] == expected
    assert [record["stopped"] for record in records] == [True, True, True, False, True]
    for row, record in zip(ROWS, records, strict=True):
        mine = by_hand(student, ids(str(row["prompt"])), record["ids"], temperature)
        theirs = by_hand(teacher, ids(str(row["prompt"])), record["ids"], temperature)
        torch.testing.assert_close(torch.tensor(record["student_logps"]), mine, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(record["teacher_logps"]), theirs, rtol=0, atol=1e-5)
        assert record["reverse_kl"] == pytest.approx(float((mine - theirs).mean()), abs=1e-5)
        assert len(record["tokens"]) == len(record["ids"])
    assert trainer.state.global_step == 0


def test_conversations_and_the_teachers_own_prompt(tmp_path: Path) -> None:
    """The student reads its template, the teacher `teacher_prompt` through the same; both score the same completion."""
    tokenizer = make_tokenizer(chat=True)
    question = [{"role": "user", "content": "1+1"}]
    told = [{"role": "user", "content": "1+1 it is 2"}]
    rows = [{"prompt": question, "teacher_prompt": told, "completion": [{"role": "assistant", "content": "2"}]}] * 4
    trainer = make_trainer(tmp_path, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows))
    records = score(trainer, rows)
    assert records[0]["ids"] == [*ids("2"), tokenizer.eos_token_id]
    mine = by_hand(make_model(0), ids("u 1+1 a "), records[0]["ids"])  # CHAT_TEMPLATE of helpers
    torch.testing.assert_close(torch.tensor(records[0]["student_logps"]), mine, rtol=0, atol=1e-5)
    theirs = by_hand(make_model(1), ids("u 1+1 it is 2 a "), records[0]["ids"])
    torch.testing.assert_close(torch.tensor(records[0]["teacher_logps"]), theirs, rtol=0, atol=1e-5)


def test_no_tensor_of_tokens_times_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own scoring: whole logits are of the few tokens only by which a model's head is understood."""
    trainer = make_trainer(tmp_path)
    shapes: list[Any] = []
    forward = type(trainer.model).forward
    monkeypatch.setattr(
        type(trainer.model),
        "forward",
        lambda self, *a, **k: (out := forward(self, *a, **k), shapes.append(out.logits.shape))[0],
    )
    score(trainer, ROWS)
    assert len(shapes) > 2 and all(shape[-1] == 1 or shape[:2].numel() <= PROBE_TOKENS for shape in shapes)


@pytest.mark.parametrize("completion", [None, 3, [{"role": "user", "content": "2"}], []])
def test_what_is_no_completion(completion: Any) -> None:
    with pytest.raises(ValueError, match="A completion must be a text or a list of one assistant message"):
        encode_completion({"completion": completion}, make_tokenizer(), [1])


def test_a_completion_that_was_cut_before_its_first_token() -> None:
    with pytest.raises(ValueError, match="there is no token to score"):
        encode_completion({"completion": "", "stopped": False}, make_tokenizer(), [1])


def test_no_bos_before_a_completion() -> None:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    assert tokenizer("1")["input_ids"][0] == 2
    assert encode_completion({"completion": "1"}, tokenizer, [1]).ids == [*ids("1"), 1]


def test_the_stop_token_is_one_that_ends_completions() -> None:
    assert encode_completion({"completion": "1"}, make_tokenizer(), [1, 20]).ids[-1] == 1
    assert encode_completion({"completion": "1"}, make_tokenizer(), [20]).ids[-1] == 20


def test_more_than_the_student_can_read(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(
        ValueError, match="Row 1 has 204 tokens, prompt and completion together, but the student reads at most 128"
    ):
        score(trainer, [ROWS[0], {"prompt": "1+1", "completion": "2" * 200}])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_as_a_user_runs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "student", make_model(0))
    save_model(tmp_path / "teacher", make_model(1))
    rows = datasets.Dataset.from_list([{"prompt": r["prompt"], "completion": r["completion"] or "1"} for r in ROWS])
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[kind](f"rows.{kind}")
    models = ("--model_name_or_path", "student", "--teacher_model_name_or_path", "teacher", "--max_completion_length", "9")
    assert cli.main(["score", *models, "--dataset_name", f"rows.{kind}", "--use_cpu", "--output", "out/scores.parquet"]) == 0
    table = pyarrow.parquet.read_table("out/scores.parquet").to_pylist()
    assert "5 completions are scored in out/scores.parquet; student - teacher" in capsys.readouterr().out
    assert set(table[0]) == {
        *("prompt", "completion", "stopped", "tokens", "ids"),
        *("student_logps", "teacher_logps", "reverse_kl"),
    }
    mine = by_hand(make_model(0), ids("12+30="), table[0]["ids"])
    torch.testing.assert_close(torch.tensor(table[0]["student_logps"]), mine, rtol=0, atol=1e-5)


def test_a_file_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("1")
    assert cli.main(["score", "--dataset_name", "rows.txt"]) == 1
    assert "is the file rows.txt, which is none of .jsonl, .json, .parquet, .csv" in capsys.readouterr().err
