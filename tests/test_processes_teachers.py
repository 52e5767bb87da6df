"""Several datasets and teachers, and self-teachers, on two processes: what one process trains, also where one has no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trl_opd.processes import gathered_state
from trl_opd.teachers import RoutedTeacher

from .helpers import lora, make_model, make_trainer, save_model
from .processes import Processes, launched
from .test_mixing import prompts
from .test_processes import WAYS, Recording, assert_same_figures, assert_same_weights, in_order_of_one, told
from .test_teachers import save_adapter

pytestmark = pytest.mark.dist


class Noting(Recording):
    """Notes the teachers of each rollout's rows on this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teachers_of_rows: list[list[str]] = []

    def score_with_teacher(self, rollout: Any) -> Any:
        self.teachers_of_rows.append([row["teacher"] for row in rollout.rows])
        return super().score_with_teacher(rollout)


def train_two(folder: str, teachers: str, base: str, adapter: str, **more: Any) -> Any:
    """Three prompts of x and one of y in a step."""
    teacher_model: dict[str, Any] = {"x": make_model(1), "y": make_model(2)}
    data = {"x": prompts("x", 12, teacher_prompt=[f"x{i}={i}" for i in range(12)]), "y": prompts("y", 4)}
    if teachers != "models":
        teacher_model = {"x": {"on the student": "base"}.get(teachers, "self"), "y": adapter}
    if teachers == "average":
        more["teacher_ema"] = 0.9
    trainer = make_trainer(
        Path(folder),
        cls=Noting,
        model=base,
        peft_config=lora(init_lora_weights=False),
        teacher_model=teacher_model,
        train_dataset=data,
        eval_dataset={"x": data["x"].select(range(3)), "y": data["y"]},
        eval_strategy="steps",
        eval_steps=2,
        prompts_per_step={"x": 3, "y": 1},
        max_steps=4,
        learning_rate=1e-3,
        **more,
    )
    trainer.train()
    assert isinstance(trainer.teacher, RoutedTeacher)
    return {**told(trainer), "teachers": trainer.teachers_of_rows}


@WAYS
@pytest.mark.parametrize("teachers", ["models", "on the student", "self", "average"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_process_without_rows_of_a_teacher(
    two: Processes, tmp_path: Path, how: str, teachers: str, accumulation: int
) -> None:
    """The first of two processes never has a row of y. Forward passes of sharded models wait for it all the same."""
    base = save_model(tmp_path / "base", make_model(0))
    paths = base, save_adapter(tmp_path / "adapter", base, 5)
    one = launched("one", train_two, str(tmp_path / "one"), teachers, *paths, per_device_train_batch_size=4)
    layout = {"per_device_train_batch_size": 2 // accumulation, "gradient_accumulation_steps": accumulation}
    several = two.run(how, train_two, str(tmp_path / how), teachers, *paths, **layout)
    if accumulation == 1:
        training = [[rows for rows in result["teachers"] if len(rows) == 2] for result in several]  # an evaluation has 4, or 8
        assert training == [[["x", "x"]] * 4, [["y", "x"]] * 4]
    assert in_order_of_one(several, shares=2 // accumulation) == one["written"]
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
@pytest.mark.parametrize("teachers", ["models", "on the student", "average"])
@pytest.mark.parametrize("granularity", ["topk", "full"])
def test_dense_objectives_train_the_same_weights(
    two: Processes, tmp_path: Path, how: str, teachers: str, granularity: str
) -> None:
    """Sharded heads are gathered for each pass, also by the process that has no token of a teacher; parts differ in number."""
    base = save_model(tmp_path / "base", make_model(0))
    paths = base, save_adapter(tmp_path / "adapter", base, 5)
    dense: dict[str, Any] = {"kl_granularity": granularity, "kl_top_k": 4, "max_tokens_per_micro_batch": 24}
    one = launched("one", train_two, str(tmp_path / "one"), teachers, *paths, per_device_train_batch_size=4, **dense)
    several = two.run(how, train_two, str(tmp_path / how), teachers, *paths, per_device_train_batch_size=2, **dense)
    assert all("divergence" in entry for entry in one["logs"] if "loss" in entry)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


def offloading(folder: str) -> None:
    make_trainer(Path(folder), teacher_offload=True)


def test_sharded_teachers_are_not_offloaded(two: Processes, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"teacher_offload is True, but under FSDP .* `fsdp_offload_params: true`"):
        two.run("fsdp2", offloading, str(tmp_path))


# ---- Self-teachers


def train_self(folder: str, resume: str | None = None, **more: Any) -> Any:
    """Teacher: a moving average of the student's adapter, which sees another prompt."""
    data = prompts("x", 12, teacher_prompt=[f"x{i}={i}" for i in range(12)])
    trainer = make_trainer(
        Path(folder),
        cls=Recording,
        peft_config=lora(init_lora_weights=False),
        teacher_model="self",
        train_dataset=data,
        max_steps=4,
        learning_rate=1e-2,
        **{"teacher_ema": 0.5, **more},
    )
    trainer.train(resume_from_checkpoint=resume)
    (teacher,) = trainer.self_teachers()
    parts = [own.clone() for own, _ in teacher._pairs()]
    if trainer.is_fsdp_enabled:
        gathered_state(trainer.student())
    return {**told(trainer), "teacher": parts, "sharded": teacher._sharded()}


@WAYS
def test_a_self_teacher_follows_and_resumes_as_one_process(two: Processes, tmp_path: Path, how: str) -> None:
    one = launched("one", train_self, str(tmp_path / "one"), per_device_train_batch_size=4)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    several = two.run(how, train_self, str(tmp_path / how), **saving)
    assert all(result["sharded"] == (how == "fsdp2") for result in several)
    assert_same_weights(one, several)
    assert_same_figures(one, several)
    if how == "ddp":
        for own, theirs in zip(one["teacher"], several[0]["teacher"], strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)

    checkpoint = tmp_path / how / "checkpoint-2"
    files = sorted(path.name for path in checkpoint.glob("self_teacher_*"))
    assert files == [f"self_teacher_{rank}.pt" for rank in range(2 if how == "fsdp2" else 1)]
    resumed = two.run(how, train_self, str(tmp_path / f"{how}-resumed"), str(checkpoint), per_device_train_batch_size=2)
    for before, after in zip(several, resumed, strict=True):
        assert after["written"] == before["written"][2:]
        assert all(torch.equal(a, b) for a, b in zip(after["teacher"], before["teacher"], strict=True))
        assert all(torch.equal(tensor, before["weights"][name]) for name, tensor in after["weights"].items())
        assert not [name for name in after["weights"] if "trl_opd_teacher" in name and how == "fsdp2"]
