"""The student as its own teacher: as it is, as a moving average of its adapter, as a copy of it every so many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from trl_opd import DistillationWarning
from trl_opd.models import TEACHER_ADAPTER
from trl_opd.teachers import SelfTeacher, StudentTeacher

from .helpers import lora, losses, make_dataset, make_model, make_trainer, weights
from .test_errors import assert_error
from .test_several_teachers import two_datasets
from .test_teachers import WEIGHTS, make_rollout, perturbed, score_by_hand, student_state

PRIVILEGED: dict[str, Any] = {"teacher_prompt": [f"{i}={i}" for i in range(16)]}


def self_trainer(folder: Path, **settings: Any) -> Any:
    """A LoRA student whose teacher sees another prompt than it does."""
    return make_trainer(
        folder,
        **{
            "peft_config": lora(init_lora_weights=False),
            "teacher_model": "self",
            "train_dataset": make_dataset(16, **PRIVILEGED),
            "max_steps": 4,
            **settings,
        },
    )


def adapters(trainer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the student's adapter and of the teacher's, under the student's names."""
    named = weights(trainer.model)
    student = {name: w for name, w in named.items() if ".default." in name}
    teacher = {name.replace(TEACHER_ADAPTER, "default"): w for name, w in named.items() if f".{TEACHER_ADAPTER}." in name}
    return student, teacher


class Notes(TrainerCallback):
    """Keeps both adapters after each step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.after: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.after.append(adapters(self.trainer))


def noted(folder: Path, **settings: Any) -> tuple[Any, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    notes = Notes()
    trainer = self_trainer(folder, callbacks=[notes], **settings)
    notes.trainer = trainer
    before = adapters(trainer)
    trainer.train()
    return trainer, [before, *notes.after]


# ---- What it is


def test_it_begins_as_the_student(tmp_path: Path) -> None:
    student = perturbed(get_peft_model(make_model(0), lora()), 4)
    for settings in ({}, {"teacher_ema": 0.9}, {"teacher_sync_steps": 2}):
        trainer = self_trainer(tmp_path, model=student, peft_config=None, **settings)
        rollout = make_rollout()
        expected_BT = score_by_hand(student, rollout)
        found_BT = torch.where(rollout.mask_BT, trainer.score_with_teacher(rollout), 0.0)
        torch.testing.assert_close(found_BT, expected_BT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("every", [None, 2])
def test_moving_average_by_hand(tmp_path: Path, every: int | None) -> None:
    """t <- 0.8 t + 0.2 s after each step, or after each second one."""
    trainer, seen = noted(tmp_path, teacher_ema=0.8, teacher_sync_steps=every)
    expected = seen[0][1]
    assert all(torch.equal(expected[name], weight) for name, weight in seen[0][0].items()) and len(expected) == 28
    for step, (student, teacher) in enumerate(seen[1:], start=1):
        if every is None or step % every == 0:
            expected = {name: 0.8 * weight + 0.2 * student[name] for name, weight in expected.items()}
        assert teacher.keys() == student.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(teacher[name], weight, atol=1e-6, rtol=1e-5)
        assert any(not torch.allclose(teacher[name], student[name], atol=1e-4) for name in student)
    assert len(seen) == 5 and isinstance(trainer.teacher, SelfTeacher)


def test_copy_every_second_step(tmp_path: Path) -> None:
    _, seen = noted(tmp_path, teacher_sync_steps=2, num_substeps=1)
    which = [0, 0, 2, 2, 4]  # the step whose student the teacher is
    for (_, teacher), step in zip(seen, which, strict=True):
        assert all(torch.equal(weight, seen[step][0][name]) for name, weight in teacher.items())
    assert not torch.equal(*(next(iter(seen[step][0].values())) for step in (0, 2)))


def test_scores_are_those_of_the_average(tmp_path: Path) -> None:
    trainer, seen = noted(tmp_path, teacher_ema=0.5)
    alone = get_peft_model(make_model(0), lora(init_lora_weights=False))
    with torch.no_grad():
        for name, weight in seen[-1][1].items():
            alone.get_parameter(name).copy_(weight)
    rollout = make_rollout()
    found_BT = torch.where(rollout.mask_BT, trainer.score_with_teacher(rollout), 0.0)
    torch.testing.assert_close(found_BT, score_by_hand(alone, rollout), atol=1e-5, rtol=1e-5)
    own_BT = torch.where(rollout.mask_BT, trainer.student_logps(rollout), 0.0)
    assert (found_BT - own_BT).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_student_as_it_is(tmp_path: Path, kind: str) -> None:
    """Nothing is copied; all weights may be trained."""
    peft_config = lora(init_lora_weights=False) if kind == "lora" else None
    trainer = self_trainer(tmp_path, peft_config=peft_config)
    assert isinstance(trainer.teacher, StudentTeacher) and trainer.self_teachers() == []
    trainer.train()
    rollout = make_rollout()
    assert torch.equal(trainer.score_with_teacher(rollout), trainer.student_logps(rollout))
    assert not trainer.score_with_teacher(rollout).requires_grad
    assert trainer.state.log_history[0]["teacher_kl"] != 0


def test_without_a_prompt_of_its_own_it_is_the_student(tmp_path: Path) -> None:
    with pytest.warns(DistillationWarning, match="'self' where it sees the student's prompt"):
        trainer = self_trainer(tmp_path, train_dataset=make_dataset(), teacher_ema=0.9)
        trainer.train()


# ---- Left out of what is trained and saved


def test_what_is_trained_stays_what_it_was(tmp_path: Path) -> None:
    """A user may train a part of the adapter."""
    student = perturbed(get_peft_model(make_model(0), lora()), 4)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    trainer = self_trainer(tmp_path, model=student, peft_config=None, teacher_ema=0.9)
    trainer.train()
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert {name.split(".", 1)[1].rsplit(".", 3)[1] for name in trained} == {"lora_B"} and len(trained) == 14
    assert not [name for name in trained if TEACHER_ADAPTER in name]


def test_it_is_neither_optimized_nor_saved_as_an_adapter(tmp_path: Path) -> None:
    trainer = self_trainer(tmp_path / "out", teacher_ema=0.9, save_strategy="steps", save_steps=2)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 28 and not [name for name in trained if TEACHER_ADAPTER in name]
    state = student_state(trainer.student())
    trainer.score_with_teacher(make_rollout())
    assert student_state(trainer.student()) == state
    trainer.train()
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(trainer.model.get_parameter(name)) for name in trained}
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "out" / "checkpoint-2"):
        assert not [key for key in load_file(folder / WEIGHTS) if TEACHER_ADAPTER in key]
    assert not list((tmp_path / "saved").glob("self_teacher*")) and not any(p.is_dir() for p in (tmp_path / "saved").iterdir())
    assert (tmp_path / "out" / "checkpoint-2" / "self_teacher_0.pt").is_file()


@pytest.mark.parametrize(
    "settings", [{"teacher_ema": 0.7}, {"teacher_sync_steps": 3}, {"teacher_ema": 0.7, "num_substeps": 2}]
)
def test_resume_equals_no_interruption(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Bit for bit: weights, losses, and the teacher, which at the checkpoint is another than the student."""
    settings = {**settings, "max_steps": 6}
    whole = self_trainer(tmp_path / "whole", save_strategy="steps", save_steps=1, **settings)
    whole.train()
    for step in (2, 3):
        resumed = self_trainer(tmp_path / "resumed", **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert losses(resumed)[-(6 - step) :] == losses(whole)[-(6 - step) :]
        for found, expected in zip(adapters(resumed), adapters(whole), strict=True):
            assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_checkpoint_without_it_is_told(tmp_path: Path) -> None:
    plain = self_trainer(tmp_path / "plain", save_strategy="steps", save_steps=1, max_steps=1)
    plain.train()
    trainer = self_trainer(tmp_path / "out", teacher_ema=0.9)
    checkpoint = str(tmp_path / "plain" / "checkpoint-1")
    assert_error(lambda: trainer.train(resume_from_checkpoint=checkpoint), "lacks self_teacher_0.pt", "teacher_ema")


# ---- Beside others, and what cannot work


def test_beside_the_base_and_under_two_names(tmp_path: Path) -> None:
    data: dict[str, Any] = two_datasets()
    data = {name: part.add_column("teacher_prompt", part["prompt"][::-1]) for name, part in data.items()}
    trainer = self_trainer(
        tmp_path,
        train_dataset=data,
        teacher_model={"x": "self", "y": "base"},
        teacher_ema=0.9,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    assert len(trainer.self_teachers()) == 1
    assert (tmp_path / "checkpoint-1" / "self_teacher_0.pt").is_file()


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    def build(**settings: Any) -> Any:
        return lambda: self_trainer(tmp_path, **settings)

    assert_error(build(teacher_ema=1.0), "teacher_ema is 1.0", "between 0 and 1")
    assert_error(build(teacher_sync_steps=0), "teacher_sync_steps is 0")
    assert_error(build(teacher_ema=0.9, teacher_model="base"), "'teacher_ema': 0.9", "no teacher is 'self'")
    assert_error(build(teacher_ema=0.9, peft_config=None), "the student has no adapter", "peft_config")
    assert_error(build(teacher_ema=0.9, peft_config=lora(bias="all"), model=make_model(0, attention_bias=True)), "are trained")
    assert_error(build(teacher_model_init_kwargs={"dtype": "float32"}), "'self', which is not loaded at all")


def test_pissa_is_not_put_on_the_base_twice(tmp_path: Path) -> None:
    """An adapter that begins by changing the base: the copy must not change it again."""
    trainer = self_trainer(tmp_path, peft_config=lora(init_lora_weights="pissa"), teacher_ema=0.9, max_steps=1)
    plain = self_trainer(tmp_path, peft_config=lora(init_lora_weights="pissa"), max_steps=1)
    rollout = make_rollout()
    torch.testing.assert_close(trainer.student_logps(rollout), plain.student_logps(rollout))
    torch.testing.assert_close(trainer.score_with_teacher(rollout), plain.score_with_teacher(rollout))
