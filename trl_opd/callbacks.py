"""What happens beside training: the progress line, and figures taken after a rollout's last update."""

from __future__ import annotations

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


def _is_result(name: str) -> bool:
    return not any(part in name for part in ("runtime", "per_second", "time/", "completions/", "prompts/"))
