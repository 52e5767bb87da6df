"""What happens beside training: the progress line, and figures taken after a rollout's last update."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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


class StopOnSigterm(TrainerCallback):
    """What `enable_jit_checkpoint` does here: after a SIGTERM, the present step is finished, saved and the last.

    Transformers' own callback saves wherever each process finds itself three seconds after its signal, which may be the middle
    of a step, and another step than that of the other processes.

    Args:
        any_process: Whether a flag is set on any process; all call it together, after each step.
    """

    def __init__(self, any_process: Callable[[bool], bool]) -> None:
        self.any_process = any_process
        self.received = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listens for the signal."""
        self.received = False
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end."""
        if self.any_process(self.received):
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listens no longer."""
        signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True


def _is_result(name: str) -> bool:
    return not any(part in name for part in ("runtime", "per_second", "time/", "completions/", "prompts/"))
