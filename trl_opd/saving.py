"""What a run leaves behind: checkpoints that resume it exactly, the adapter, the model card, the push to the Hub."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer

from . import checks, processes, state
from .config import OnPolicyDistillationConfig
from .curves import draw_curves
from .metrics import Metrics
from .mixing import NamedRows
from .model_card import CardFacts, model_card, objective
from .models import state_without_teachers, without_teachers
from .report.data import set_aside
from .teachers import SelfTeacher, Teacher, teachers_of


class SavingTrainer(Trainer):
    """A Trainer whose checkpoints hold the rollout in hand, and which pushes an adapter with a card of its own."""

    args: OnPolicyDistillationConfig
    command: str | None
    """That began the run, for the card."""
    model: Any  # Trainer's annotation lacks PeftModel
    model_wrapped: Any
    metrics: Metrics
    progress: state.Progress
    student_name: str
    teacher: Teacher
    teacher_name: str | dict[str, str]

    def student(self) -> PreTrainedModel | PeftModel:
        """The model that is trained, out of its wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def self_teachers(self) -> list[SelfTeacher]:
        """Teachers that follow the student and are saved with it."""
        return [teacher for teacher in teachers_of(self.teacher) if isinstance(teacher, SelfTeacher)]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; of sharded weights, what was trained is gathered, whatever `fsdp_state_dict_type` says.

        All processes must call this.
        """
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir, state_dict=processes.gathered_state(self.student()))
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        if not _internal_call and not self.args.push_to_hub:  # a push brings a card; else peft's blank one would stay
            self._write_card(output_dir or str(self.args.output_dir), [], [], {})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
        window = self.metrics.totals()
        progress = replace(
            self.progress,
            tokens=self.progress.tokens + window.get("tokens", 0.0),
            teacher_tokens=self.progress.teacher_tokens + window.get("teacher_tokens", 0.0),
            position=self._stream_position(),
        )
        progress.save(folder, self.accelerator.process_index, self.accelerator.num_processes)
        for teacher in self.self_teachers():
            teacher.save(folder, self.accelerator.process_index)
        super()._save_checkpoint(model, trial)

    def saved_for_later(self, trial: Any) -> str:
        """Between two steps of a run that cannot go on: writes a checkpoint, says how to resume. For all processes to call."""
        if self.state.global_step == 0:
            return "No step had been trained."
        self._save_checkpoint(self.model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        folder = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
        return (
            f"The state after step {self.state.global_step} is saved in '{folder}'. When the server is back, go on from there "
            f"with trainer.train(resume_from_checkpoint='{folder}')."
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        accelerator = self.accelerator
        self.progress = state.Progress.load(
            resume_from_checkpoint, accelerator.process_index, accelerator.num_processes, self.args.device
        )
        for teacher in self.self_teachers():
            teacher.load(resume_from_checkpoint, accelerator.process_index)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Passes through the data and micro-batches since, to skip. Trainer presumes that a stream lasts `max_steps` steps."""
        passes_and_batches = super()._init_training_state(*args, **kwargs)
        resumes_stream = isinstance(self.train_dataset, datasets.IterableDataset) and not self.args.ignore_data_skip
        return self.progress.position if resumes_stream else passes_and_batches

    def _stream_position(self) -> tuple[int, int]:
        epoch, batches_in_epoch = self.state.epoch or 0.0, self.state.max_steps * self.args.gradient_accumulation_steps
        passes = max(0, math.ceil(epoch) - 1)  # only a pass that `max_steps` ended, and not the stream, is a whole epoch
        return passes, round((epoch - passes) * batches_in_epoch)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        state_dict = state_without_teachers(self.student(), state_dict)
        with without_teachers(self.student()):
            super()._save(output_dir, state_dict)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset: str | list[str] | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **metadata: Any,
    ) -> None:
        """Writes `README.md` into `output_dir`: student, teacher, objective, adapter, data, figures, loading, citation.

        Args:
            model_name: Title, where no repository has been named yet.
            dataset: Hub ids of the training data.
            dataset_name: The same under TRL's name for it.
            tags: More tags than the card has anyway.
            metadata: More entries of its head, such as license and language.
        """
        datasets_named = [*_listed(dataset), *_listed(dataset_name)]
        self._write_card(str(self.args.output_dir), datasets_named, _listed(tags), metadata, model_name)

    def _write_card(
        self, folder: str, datasets_named: list[str], tags: list[str], metadata: dict[str, Any], name: str | None = None
    ) -> None:
        if not self.is_world_process_zero():
            return
        student, history = self.student(), self.state.log_history
        if self.args.load_best_model_at_end and self.state.best_global_step:
            history = [
                entry for entry in history if entry["step"] <= self.state.best_global_step
            ]  # the weights that are saved
        facts = CardFacts(
            name=self.hub_model_id or name or Path(folder).resolve().name,
            student=self.student_name,
            teacher=self.teacher_name,
            objective=objective(self.args),
            lora=student.active_peft_config if isinstance(student, PeftModel) else None,
            datasets=datasets_named,
            num_prompts=self._num_prompts(),
            history=history,
            tags=tags,
            metadata=metadata,
            command=self.command,
            curves=draw_curves(history, folder),
        )
        model_card(facts).save(f"{folder}/README.md")

    def _num_prompts(self) -> int | dict[str, int] | None:
        if isinstance(self.train_dataset, NamedRows):
            return self.train_dataset.sizes
        return len(self.train_dataset) if isinstance(self.train_dataset, datasets.Dataset) else None

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, but the model is saved in `output_dir` before the Hub is asked for anything.

        Raises:
            RuntimeError: If the Hub cannot be reached or does not take the push.
        """
        self.save_model(_internal_call=True)
        if self.is_world_process_zero():
            set_aside(Path(str(self.args.output_dir)))  # the report holds prompts, which may be private
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:  # of many classes, which differ between versions of the client; told, not swallowed
            raise RuntimeError(f"{self._push_failed(error)} Try again with trainer.push_to_hub().") from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._report_failed_pushes()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_failed_pushes()

    def _report_failed_pushes(self) -> None:
        """Warns of pushes in the background that have failed since the last call, of which Trainer says nothing."""
        push = getattr(self, "push_in_progress", None)  # Trainer sets it on the process that pushes, if any does
        if push is None or not push.is_done():
            return
        for error in [job.exception() for job in push.jobs]:
            if error is not None:
                checks.warn(f"{self._push_failed(error)} Training goes on.")
        push.jobs = []

    def _push_failed(self, error: BaseException) -> str:
        return (
            f"The push to '{self.hub_model_id or self.args.hub_model_id}' on the Hub failed "
            f"({type(error).__name__}: {error}). Nothing is lost: the model is saved in '{self.args.output_dir}'."
        )


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
