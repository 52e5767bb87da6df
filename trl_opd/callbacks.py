"""What happens beside training: the progress line, and figures taken after a rollout's last update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .launcher import AT_ONCE

PROGRESS_FIGURES = {
    "loss": "loss",
    "teacher_kl": "teacher_kl",
    "reward": "reward",
    "completions/mean_length": "length",
    "completions/truncated_fraction": "cut",
    "tokens_per_second": "tok/s",
}


class DistillationProgressCallback(ProgressCallback):
    """transformers' progress bar with the teacher KL and a few more figures beside it, instead of a line of every figure."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Updates the bar; evaluation figures get a line of their own."""
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {label: f"{logs[name]:.3g}" for name, label in PROGRESS_FIGURES.items() if name in logs}
        if shown:
            self.training_bar.set_postfix(shown)
        evaluated = {name: round(value, 4) for name, value in logs.items() if name.startswith("eval_") and _is_result(name)}
        if evaluated:
            self.training_bar.write(f"step {state.global_step}: " + ", ".join(f"{k} {v:g}" for k, v in evaluated.items()))


class AfterStepCallback(TrainerCallback):
    """Calls a function after each optimizer step, before anything is logged for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Calls the function."""
        self.function()


class StopOnSignals(TrainerCallback):
    """After a signal, the present step is finished, saved and the last; `enable_jit_checkpoint` does it for SIGTERM.

    Transformers' own callback saves wherever each process finds itself three seconds after its signal, which may be the middle
    of a step, and another step than that of the other processes.

    Args:
        any_process: Whether a flag is set on any process; all call it together, after each step.
        signals: Those listened for. A second SIGINT ends the process at once, by KeyboardInterrupt.
    """

    def __init__(self, any_process: Callable[[bool], bool], signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.any_process, self.signals = any_process, signals
        self.received: int | None = None
        """The signal that has come to this process."""
        self.stopped = False
        """Whether training was ended for a signal that came to any process."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listens for the signals."""
        self.received, self.stopped, self._speaks = None, False, state.is_world_process_zero
        self._before = {number: signal.signal(number, self._receive) for number in self.signals}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end."""
        if self.any_process(self.received is not None):
            control.should_save = control.should_training_stop = self.stopped = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listens no longer."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._first = number, now
            if self._speaks and number == signal.SIGINT:  # print may be at work in the code that was interrupted
                os.write(2, b"\nThis step is finished and saved before the end; Ctrl-C again ends at once.\n")
        elif number == signal.SIGINT and now - self._first > AT_ONCE:
            raise KeyboardInterrupt


def _is_result(name: str) -> bool:
    return not any(part in name for part in ("runtime", "per_second", "time/", "completions/", "prompts/"))
