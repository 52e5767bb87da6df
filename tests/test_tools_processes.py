"""Tools on two processes: one of which may have calls where the other has none, and must sample as often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from trl_opd import OnPolicyDistillationTrainer, Rollout
from trl_opd.rollout import ToolEngine
from trl_opd.rows import Filler

from .helpers import make_model, make_trainer
from .processes import Processes, launched
from .tool_chat import OwnWeights, double, make_tool_tokenizer

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:.*(guessing|were cut)")]  # random models
CALL = "<call>double x=3</call><eos>"


class Recording(OnPolicyDistillationTrainer):
    """Keeps what each row wrote, in turns, and how often this process sampled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written: list[tuple[str, list[int]]] = []
        self.calls = 0
        assert isinstance(self.engine, ToolEngine)
        self.engine.engine = Calling(self.engine.engine, self)

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        pairs = zip(rows, rollout.completion_ids(), strict=True)
        self.written += [(row["prompt"][0]["content"], ids) for row, ids in pairs if not isinstance(row, Filler)]
        return rollout.with_sampled_logps(torch.where(rollout.mask_BT, self.student_logps(rollout), 0.0))


class Calling(OwnWeights):
    """Samples from the student, but after a prompt of n "c" the first n turns are calls."""

    def __init__(self, engine: Any, trainer: Recording) -> None:
        self.engine, self.trainer, self.tokenizer = engine, trainer, make_tool_tokenizer()

    def generate(self, model: Any, prompts: list[list[int]], seeds: Any = None, limits: Any = None) -> Any:
        """The student's own completions, some of them replaced."""
        self.trainer.calls += 1
        call = self.tokenizer(CALL)["input_ids"]
        c, tool = (self.tokenizer.get_vocab()[token] for token in ("c", "<t>"))
        turns = self.engine.generate(model, prompts, seeds, limits)
        for row, prompt in enumerate(prompts):
            if prompt.count(tool) < prompt.count(c) and (limits or [0] * len(prompts))[row] > len(call) + 20:
                turns[row] = type(turns[row])(call, [-1.0] * len(call), True)
        return turns


def run(folder: Path, **more: Any) -> tuple[list[tuple[str, list[int]]], int, float]:
    """Trains one step; what was written, how often this process sampled, and the share of calls."""
    # 4 rows a process; only those of the first have calls, and of different number
    texts = ["c", "cc", "x", "ccc", "y", "z", "u", "v"]
    data = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})
    trainer = make_trainer(
        folder,
        cls=Recording,
        model=make_model(0, vocab_size=61),
        teacher_model=make_model(1, vocab_size=61),
        processing_class=make_tool_tokenizer(),
        train_dataset=data,
        tools=[double],
        max_completion_length=90,
        max_steps=1,
        train_sampling_strategy="sequential",
        **more,
    )
    trainer.train()
    return trainer.written, trainer.calls, trainer.state.log_history[0]["tools/call_frequency"]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_write_what_one_writes(two: Processes, tmp_path: Path, how: str) -> None:
    (one, calls, frequency) = launched("one", run, tmp_path / "one", per_device_train_batch_size=8)
    both = two.run(how, run, tmp_path / "two", per_device_train_batch_size=4, per_device_rollout_batch_size=2)
    assert sorted(both[0][0] + both[1][0]) == sorted(one)
    assert both[0][2] == both[1][2] == frequency > 0
    assert calls > 1
    assert both[0][1] == calls
    assert both[1][1] == calls if how == "fsdp2" else both[1][1] < calls
