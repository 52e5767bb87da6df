"""Completions as a person sees them: printed, kept as parquet, and the progress line."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, ProgressCallback

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.batch import Completion, Rollout, ScoredBatch
from trl_opd.callbacks import DistillationProgressCallback
from trl_opd.completions import completion_records, print_completions

from .helpers import make_dataset, make_trainer

GREEN, RED, UNDERLINE, DIM = "38;2;0;255;0", "38;2;255;0;0", "4;", "2m"


def record(**more: Any) -> dict[str, Any]:
    """Three tokens, of which the teacher likes the first better, the second worse and the third as the student does."""
    values: dict[str, Any] = {
        "step": 3,
        "dataset": "train",
        "prompt": "1+1=",
        "completion": "abc",
        "stopped": True,
        "tokens": ["a", "b", "c"],
        "trained": [True, True, True],
        "advantages": [2.0, -2.0, 0.0],
    }
    return {**values, **more}


def printed(*records: dict[str, Any], styles: bool = False, width: int = 120) -> str:
    console = Console(record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width)
    print_completions(list(records), console)
    return console.export_text(styles=styles)


def styles_of(text: str) -> dict[str, str]:
    """The codes before each single-letter token."""
    return {token: codes for codes, token in re.findall(r"\x1b\[([\d;]*m)([a-z])\x1b", text)}


def test_tokens_are_coloured_by_advantage() -> None:
    """Green is better, red and underlined is worse, and nothing is coloured that is neither."""
    text = printed(record(), styles=True)
    codes = styles_of(text)
    assert codes["a"].startswith(GREEN)
    assert UNDERLINE in codes["b"] and RED in codes["b"]
    assert "c" not in codes
    assert "1+1=abc" in printed(record())


def test_only_the_prompt_is_dim() -> None:
    text = printed(record(), styles=True)
    assert f"\x1b[{DIM}1+1=" in text
    assert all(not codes.startswith("2;") for codes in styles_of(text).values())


def test_the_strength_of_a_colour_is_relative_to_the_greatest_advantage() -> None:
    codes = styles_of(printed(record(advantages=[1.0, -4.0, 0.001]), styles=True))
    assert codes["a"].startswith("38;2;0;105;0")  # 55 + 200 / 4
    assert RED in codes["b"]
    assert "c" not in codes


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    """Rich reads [red] as a colour and [/] as an error; a model may write either."""
    markup = record(prompt="[bold]x[/bold]", tokens=["[red]", "[/]", "[/nope]"], dataset="[link=a]b[/link]")
    text = printed(markup)
    assert "[bold]x[/bold][red][/][/nope]" in text
    assert "[link=a]b[/link]" in text


def test_a_cut_completion_is_marked() -> None:
    assert "1+1=abc [cut]" in printed(record(stopped=False))
    assert "[cut]" not in printed(record())


def test_the_first_completion_of_each_dataset_is_shown() -> None:
    text = printed(record(), record(prompt="2+2="), record(prompt="3+3=", dataset="other"))
    assert [shown in text for shown in ("1+1=", "2+2=", "3+3=")] == [True, False, True]
    assert text.index("train") < text.index("other")
    assert "step 3" in text


def test_a_completion_without_advantages_is_shown() -> None:
    """All zero, as where it is masked, or none at all."""
    assert "1+1=abc" in printed(record(advantages=[0.0, 0.0, 0.0]))
    assert "1+1=" in printed(record(tokens=[], trained=[], advantages=[]))


# ---- In a run


class Recording(OnPolicyDistillationTrainer):
    """Keeps the scored batches."""

    def scored_batch(self, rows: list[dict[str, Any]], *written: Any) -> Any:
        batch = super().scored_batch(rows, *written)
        self.__dict__.setdefault("batches", []).append(batch)
        return batch


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: pyarrow.parquet.read_table(path).to_pylist() for path in sorted(folder.glob("_completions/*"))}


def test_the_table_has_a_row_a_completion_and_its_columns_line_up(tmp_path: Path) -> None:
    """Token by token the values of the batch that was trained on, evaluation's completions not among them."""
    run = make_trainer(
        tmp_path,
        cls=Recording,
        log_completions=True,
        reward_funcs=digits,
        num_generations=2,
        eval_dataset=make_dataset(2),
        eval_strategy="steps",
        eval_steps=1,
        train_dataset=make_dataset(8, other=["x"] * 8),
        max_completion_length=14,
    )
    run.train()
    tables = read(tmp_path)
    assert list(tables) == ["step_000001.parquet", "step_000002.parquet"]
    decode = run.processing_class.decode
    for step, (rows, batch) in enumerate(zip(tables.values(), run.batches, strict=True), start=1):
        assert len(rows) == len(batch) == 4
        for i, row in enumerate(rows):
            where = batch.mask_BT[i]
            assert row["step"] == step
            assert row["dataset"] == "train"
            assert row["prompt"] == decode(batch.ids_BT[i, : int(where.int().argmax())])
            assert row["prompt"].replace(" ", "") in run.train_dataset["prompt"]
            assert [text.strip(" ") for text in row["tokens"]] == [decode([t]).strip(" ") for t in batch.ids_BT[i][where]]
            assert row["completion"] == decode(batch.ids_BT[i][where])
            assert row["prompt"] + "".join(row["tokens"]) == decode(batch.ids_BT[i][batch.attention_mask_BT[i]])
            assert row["stopped"] == (row["tokens"][-1].strip() == "<eos>")
            assert row["sampled_logps"] == batch.sampled_logps_BT[i][where].tolist()
            assert row["teacher_logps"] == batch.teacher_logps_BT[i][where].tolist()
            assert row["advantages"] == batch.advantages_BT[i][where].tolist()
            expected = [
                q - s + row["reward_advantage"] for s, q in zip(row["sampled_logps"], row["teacher_logps"], strict=True)
            ]
            assert row["advantages"] == pytest.approx(expected, abs=1e-5)
    assert any(row["reward_advantage"] != 0 for rows in tables.values() for row in rows)
    assert any(row["stopped"] for rows in tables.values() for row in rows)
    assert any(not row["stopped"] for rows in tables.values() for row in rows)


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.ByteLevel()], ids=["▁", "Ġ"])
def test_words_keep_the_space_before_them(decoder: Any) -> None:
    """Decoded alone, "▁world" is "world"; a text put together from such tokens would have no spaces."""
    space = "▁" if isinstance(decoder, decoders.Metaspace) else "Ġ"
    words = ["<pad>", "<eos>", "a", f"{space}hello", f"{space}world", "s"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    completion = Completion(ids=[3, 4, 5, 1], logps=[-1.0] * 4, stopped=True)
    rollout = Rollout.build([[2]], [completion], [{"prompt": "a"}], pad_id=0, device=torch.device("cpu"))
    zeros_BT = torch.zeros(rollout.ids_BT.shape)
    batch = ScoredBatch.of(rollout, zeros_BT, torch.zeros(1), zeros_BT)
    (row,) = completion_records(rollout, batch, tokenizer, step=1)
    assert row["tokens"] == [" hello", " world", "s", "<eos>"]
    assert row["prompt"] == "a"
    assert "a hello worlds<eos>" in printed(row)


def test_masked_completions_are_kept_with_zero_advantages(tmp_path: Path) -> None:
    make_trainer(tmp_path, log_completions=True, mask_truncated_completions=True, max_steps=6).train()
    rows = [row for rows in read(tmp_path).values() for row in rows]
    cut = [row for row in rows if not row["stopped"]]
    assert 0 < len(cut) < len(rows)
    for row in cut:
        assert len(row["tokens"]) == len(row["sampled_logps"]) == 6
        assert set(row["advantages"]) == {0.0}


def test_a_tokenizer_need_not_know_any_letter(tmp_path: Path) -> None:
    folder = Path(__file__).parent.parent / "examples" / "addition"
    trainer = make_trainer(
        tmp_path,
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["123+456="] * 8}),
        processing_class=None,
        log_completions=True,
    )
    trainer.train()
    table = pyarrow.parquet.read_table(tmp_path / "_completions" / "step_000001.parquet").to_pylist()
    assert all("".join(row["tokens"]) == row["completion"] for row in table)


def test_one_table_a_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two optimizer steps a rollout, the second has nothing new to show."""
    make_trainer(tmp_path, log_completions=True, num_substeps=2, max_steps=4).train()
    tables = read(tmp_path)
    assert list(tables) == ["step_000001.parquet", "step_000003.parquet"]
    assert {len(rows) for rows in tables.values()} == {8}
    assert capsys.readouterr().out.count("green: teacher") == 2


def test_a_dataset_column_of_any_kind_is_a_name(tmp_path: Path) -> None:
    """The user's own column of that name need not hold text."""
    data = make_dataset(4, dataset=[["a"], ["a"], ["b"], ["b"]])
    make_trainer(tmp_path, log_completions=True, train_dataset=data, max_steps=1).train()
    (rows,) = read(tmp_path).values()
    assert {row["dataset"] for row in rows} == {"['a']", "['b']"}


def test_a_run_prints_a_completion_at_each_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, log_completions=True).train()
    shown = capsys.readouterr().out
    for rows in read(tmp_path).values():
        assert rows[0]["prompt"] + "".join(rows[0]["tokens"]) in shown
    assert shown.count("green: teacher likes it better, red: less") == 2


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path).train()
    assert not (tmp_path / "_completions").exists()
    assert "green: teacher" not in capsys.readouterr().out


# ---- The progress line


def test_the_progress_line_shows_teacher_kl_and_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_trainer(
        tmp_path,
        disable_tqdm=False,
        eval_dataset={"held": make_dataset(2), "out": make_dataset(1)},
        evaluators=[lambda trainer: {"score": 0.25}],
        eval_strategy="steps",
        eval_steps=1,
        reward_funcs=digits,
        num_generations=2,
    )
    assert [type(c) for c in run.callback_handler.callbacks if isinstance(c, ProgressCallback)] == [
        DistillationProgressCallback
    ]
    run.train()
    shown = "".join(capsys.readouterr())
    for entry in run.state.log_history:
        if "loss" in entry:
            assert f"teacher_kl={entry['teacher_kl']:.3g}" in shown
            assert f"reward={entry['reward']:.3g}" in shown
            assert f"length={entry['completions/mean_length']:.3g}" in shown
        if "eval_held_teacher_kl" in entry:
            assert f"step {entry['step']}: eval_held_teacher_kl {round(entry['eval_held_teacher_kl'], 4):g}" in shown
    assert shown.count("eval_score 0.25") == 3
    assert shown.count("eval_out_teacher_kl ") == 3
    assert "grad_norm" not in shown


def test_without_a_progress_bar_there_is_none(tmp_path: Path) -> None:
    run = make_trainer(tmp_path, disable_tqdm=True)
    assert not any(isinstance(c, ProgressCallback) for c in run.callback_handler.callbacks)
    assert any(isinstance(c, PrinterCallback) for c in run.callback_handler.callbacks)
