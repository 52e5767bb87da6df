"""The course of figures, as text and as a picture, and the card that `save_model` leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from trl_opd.curves import draw_curves, series, sparkline

from .helpers import lora, make_trainer


def test_series_are_the_finite_numbers_of_a_figure() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "a": 2},
        {"step": 2},
        {"step": 3, "a": "text"},
        {"step": 4, "a": float("nan")},
    ]
    assert series([*history, {"step": 5, "a": 0.5}], "a") == [(1, 2.0), (5, 0.5)]


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0, 3.0], "▁█▄"),
        ([0.0, 4.0, 4.0, 4.0, 8.0, 8.0], "▁▃█"),  # of width 3: means 2, 4 and 8
    ],
)
def test_sparklines_by_hand(values: list[float], blocks: str) -> None:
    assert sparkline(values, width=3 if len(values) == 6 else 16) == blocks


def test_a_picture_only_of_what_has_a_course(tmp_path: Path) -> None:
    assert draw_curves([{"step": 1, "teacher_kl": 1.0}, {"step": 2, "loss": 1.0}], tmp_path) is None
    assert draw_curves([{"step": 1, "teacher_kl": 1.0}, {"step": 2, "teacher_kl": -1.0}], tmp_path) == "curves.png"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_save_model_leaves_our_card_and_no_blank_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in another folder than output_dir, under its name; checkpoints have none of ours."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/trl-opd", "train", "--hub_token", "hf_secretsecret", "--seed", "1"])
    trainer = make_trainer(tmp_path / "out", peft_config=lora(), save_strategy="steps", save_steps=1)
    trainer.train()
    for folder in ("out", "elsewhere"):
        trainer.save_model(str(tmp_path / folder) if folder != "out" else None)
        card = ModelCard.load(tmp_path / folder / "README.md")
        assert f"# {folder}\n" in card.text and "distilled on-policy" in card.text
        assert "```bash\ntrl-opd train --hub_token HIDDEN --seed 1\n```" in card.text
        assert "![Curves of the run](curves.png)" in card.text and (tmp_path / folder / "curves.png").is_file()
        assert str(tmp_path) not in card.content
    assert "distilled on-policy" not in (tmp_path / "out/checkpoint-1/README.md").read_text()


def test_in_a_notebook_there_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/ipykernel_launcher.py", "-f", "/tmp/kernel.json"])
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert "## Command" not in (tmp_path / "README.md").read_text()
