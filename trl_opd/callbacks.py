"""What happens beside training: the progress line, completions for people, figures taken after a rollout's last update."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from typing import Any

import pandas
from accelerate.utils import gather_object
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import completions
from .batch import Rollout, ScoredBatch

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


class RolloutCallback(TrainerCallback):
    """A callback that also sees what the student wrote. Pass yours as `callbacks=[...]` of the trainer."""

    def on_rollout(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rollout: Rollout,
        batch: ScoredBatch,
        trainer: Any,
    ) -> None:
        """Called on every process for each rollout of training, scored and not yet trained on; not in evaluation.

        Args:
            args: Settings.
            state: `global_step` is the number of steps before this rollout's first.
            control: As in the other events.
            rollout: This process's completions, with their dataset rows; some may be `Filler`s, see `real_B`.
            batch: The same with the teacher's log-probs and advantages. Neither may be written into.
            trainer: The trainer.
        """


class CompletionsCallback(RolloutCallback):
    """At each log, prints a completion of each dataset coloured by advantage, and keeps all as parquet (`log_completions`).

    Where `report_to` has "wandb" or "trackio", they go there too, as the table "completions".
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forgets what an earlier run left."""
        self._records = []

    def on_rollout(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rollout: Rollout,
        batch: ScoredBatch,
        trainer: Any,
    ) -> None:
        """Keeps the rollout until the next log."""
        self._records = completions.completion_records(rollout, batch, trainer.processing_class, state.global_step + 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the rollout of all processes, each of which calls this."""
        if not logs or "loss" not in logs:
            return
        records = gather_object(self._records)
        self._records = []
        if records and state.is_world_process_zero:
            completions.write_completions(records, str(args.output_dir))
            completions.print_completions(records)
            log_table(records, args.report_to)


def log_table(records: list[dict[str, Any]], report_to: list[str] | str | None) -> None:
    """Sends the completions to the trackers that take tables: as "completions", the newest each time."""
    rows = [
        {name: record[name] for name in ("step", "dataset", "prompt", "completion", "stopped", "reward_advantage")}
        | {"mean_advantage": sum(record["advantages"]) / max(1, sum(record["trained"])), "length": len(record["tokens"])}
        for record in records
    ]
    for name in ("wandb", "trackio"):
        if name in (report_to or []):
            tracker = importlib.import_module(name)  # Trainer has made sure that it is installed
            tracker.log({"completions": tracker.Table(dataframe=pandas.DataFrame(rows))})


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
