"""Traces of chosen optimizer steps: what ran when, for Perfetto or chrome://tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function
from torch.profiler import profile
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class TraceCallback(TrainerCallback):
    """Writes `output_dir/traces/step_<n>.json` of each of the optimizer steps; with several processes, one of each.

    A step begins where its rows are fetched, before its rollout, which is also before Trainer's `on_step_begin`: the trainer
    calls `begin` there. It ends at `on_step_end`. Evaluation, logs and checkpoints lie between steps and are in no trace.

    Args:
        steps: Which, counted from 1, as in the logs.
    """

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self._open = ExitStack()
        self._profile: profile | None = None
        self._update: record_function | None = None

    def begin(self, trainer: Trainer) -> None:
        """Begins the trace of the trainer's next step, if it is one of `steps` and has not begun."""
        number = trainer.state.global_step + 1
        if number not in self.steps or self._profile is not None:
            return
        self._profile = self._open.enter_context(profile())
        self._open.enter_context(_named(trainer, "compute_loss", "forward"))
        self._open.enter_context(_named(trainer.accelerator, "backward", "backward"))
        self._open.enter_context(record_function(f"step {number}"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the span of the optimizer."""
        if self._profile is not None:
            self._update = record_function("optimizer")
            self._update.__enter__()

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Closes it."""
        if self._update is not None:
            self._update.__exit__(None, None, None)
            self._update = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the trace of the step that ended."""
        done, _ = self._profile, self._drop()
        if done is None:
            return
        rank = f"_rank{args.process_index}" if args.world_size > 1 else ""
        self.write(done, Path(str(args.output_dir)) / "traces" / f"step_{state.global_step}{rank}.json")

    def write(self, done: profile, path: Path) -> None:
        """Writes what was recorded of a step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(path))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Drops what a run left that an error ended."""
        self._drop()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Drops a step that found no rows."""
        self._drop()

    def _drop(self) -> None:
        self._open.close()
        self._profile = self._update = None


@contextmanager
def _named(owner: Any, method: str, span: str) -> Iterator[None]:
    """Inside, calls of `owner`'s method are a span of the trace."""
    own: Callable[..., Any] = getattr(owner, method)
    replaced = method in vars(owner)  # by a user, for this object only

    @functools.wraps(own)
    def called(*args: Any, **kwargs: Any) -> Any:
        with record_function(span):
            return own(*args, **kwargs)

    setattr(owner, method, called)
    try:
        yield
    finally:
        if replaced:
            setattr(owner, method, own)
        else:
            delattr(owner, method)  # the class's is there again
