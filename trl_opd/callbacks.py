"""What happens beside training: the progress line, completions for people, figures taken after a rollout's last update."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas
from accelerate.utils import gather_object
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import completions
from .batch import Rollout, ScoredBatch
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
