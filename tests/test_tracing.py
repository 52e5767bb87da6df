"""Traces of optimizer steps: which steps, which spans, in which order, and nothing of it where none is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from trl_opd import OnPolicyDistillationConfig
from trl_opd.tracing import TraceCallback

from .helpers import lora, make_dataset, make_trainer
from .processes import Processes

Span = tuple[str, float, float]


def spans(path: Path) -> list[Span]:
    """Name, begin and end of the spans that we named, by their begin; torch's own are called `something#more`."""
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and "#" not in event["name"]]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in named), key=lambda span: span[1])


def traced(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").iterdir())


def test_a_trace_holds_its_whole_step_from_the_rollout_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    make_trainer(tmp_path, trace_steps=[1, 3], peft_config=lora(), **settings).train()
    assert traced(tmp_path) == ["step_1.json", "step_3.json"]
    for number in (1, 3):
        found = [span for span in spans(tmp_path / f"traces/step_{number}.json") if span[0] not in ("prefill", "decode")]
        step, inner = found[0], found[1:]
        assert step[0] == f"step {number}"
        assert all(step[1] <= begin and end <= step[2] for _, begin, end in inner)
        pass_ = ["train", "forward", "backward"]
        assert [name for name, *_ in inner] == ["sync", "rollout", "teacher", *pass_, *pass_, "optimizer"]
        for outer, forward, backward in (inner[3:6], inner[6:9]):
            assert outer[1] <= forward[1] < forward[2] <= backward[1] < backward[2] <= outer[2]
        ends = [end for name, _, end in inner if name not in ("forward", "backward")]
        begins = [begin for name, begin, _ in inner if name not in ("forward", "backward")]
        assert all(end <= begin for end, begin in zip(ends[:-1], begins[1:], strict=True))  # one after the other


def test_what_runs_between_steps_is_in_no_trace(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_dataset(3)}
    make_trainer(tmp_path, trace_steps=[1, 2], **settings).train()
    for number in (1, 2):
        names = [name for name, *_ in spans(tmp_path / f"traces/step_{number}.json")]
        assert names.count("rollout") == 1 and "eval" not in names


def test_an_update_without_a_rollout_has_none_in_its_trace(tmp_path: Path) -> None:
    make_trainer(tmp_path, num_substeps=2, trace_steps=[2]).train()
    names = [name for name, *_ in spans(tmp_path / "traces/step_2.json")]
    assert [name for name in names if name != "step 2"] == ["train", "forward", "backward", "optimizer"]


class Watching(TrainerCallback):
    """Whether a profiler runs in the updates, and whether the trainer's methods are its class's."""

    def __init__(self) -> None:
        self.profiled: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.profiled.append(torch.autograd._profiler_enabled())


def test_only_the_steps_asked_for_are_profiled(tmp_path: Path) -> None:
    watching = Watching()
    trainer = make_trainer(tmp_path, max_steps=3, trace_steps=[2], callbacks=[watching])
    trainer.train()
    assert watching.profiled == [False, True, False]
    assert "compute_loss" not in vars(trainer) and "backward" not in vars(trainer.accelerator)


def test_a_method_replaced_for_one_trainer_stays_replaced(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, trace_steps=[1], max_steps=3)
    own, steps = trainer.compute_loss, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        steps.append(trainer.state.global_step)
        return own(*args, **kwargs)

    trainer.compute_loss = counted
    trainer.train()
    assert steps == [0, 1, 2]


def test_without_the_setting_there_is_no_profiler_and_no_file(tmp_path: Path) -> None:
    watching = Watching()
    trainer = make_trainer(tmp_path, callbacks=[watching])
    trainer.train()
    assert watching.profiled == [False, False]
    assert not any(isinstance(callback, TraceCallback) for callback in trainer.callback_handler.callbacks)
    assert not (tmp_path / "traces").exists()


class Failing(TrainerCallback):
    def __init__(self) -> None:
        self.fails = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fails:
            raise OSError("disk full")


def test_a_run_after_one_that_failed_in_a_traced_step_traces_anew(tmp_path: Path) -> None:
    failing = Failing()
    trainer = make_trainer(tmp_path, trace_steps=[1], callbacks=[failing])
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    failing.fails = False
    trainer.train()
    names = [name for name, *_ in spans(tmp_path / "traces/step_1.json")]
    assert [names.count(name) for name in ("step 1", "rollout", "optimizer")] == [1, 1, 1]


@pytest.mark.parametrize("value", [3, [0], ["2"], [1, -1]])
def test_steps_that_are_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"trace_steps is .*must be a list of optimizer steps, which count from 1"):
        OnPolicyDistillationConfig(output_dir=str(tmp_path), trace_steps=value)


def _train_traced(folder: str) -> int:
    return make_trainer(Path(folder), trace_steps=[2]).train().global_step


@pytest.mark.dist
def test_each_process_writes_its_own(tmp_path: Path) -> None:
    workers = Processes(2)
    try:
        assert workers.run("ddp", _train_traced, str(tmp_path)) == [2, 2]
    finally:
        workers.stop()
    assert traced(tmp_path) == ["step_2_rank0.json", "step_2_rank1.json"]
    for name in traced(tmp_path):
        assert {"step 2", "rollout", "teacher", "backward"} <= {span for span, *_ in spans(tmp_path / "traces" / name)}
