"""How on-policy distillation fits into `transformers.Trainer`: its batches, evaluation, logs, checkpoints and Hub pushes.

What is computed is not here: `trainer.py` turns dataset rows into a `ScoredBatch`, and that into a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from . import checks, completions, state
from .batch import Rollout, ScoredBatch
from .config import OnPolicyDistillationConfig
from .logprobs import score_in_batches
from .loss import count_items
from .metrics import Metrics
from .model_card import CardFacts, model_card
from .models import TEACHER_ADAPTER, eval_mode, state_without_adapter, without_adapter
from .prompts import PromptSampler
from .rng import forked_rng

Row = dict[str, Any]
TRAIN, EVAL = 0, 1
"""Random streams of rollouts."""


class DistillationLoop(Trainer):
    """The part of the trainer that is not the algorithm. `OnPolicyDistillationTrainer` fills in the rest."""

    args: OnPolicyDistillationConfig
    model: Any  # Trainer's annotation lacks PeftModel
    model_wrapped: Any
    processing_class: PreTrainedTokenizerBase
    evaluators: list[Callable[[Any], dict[str, float]]]
    student_name: str
    teacher_name: str
    vocab_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = True  # the loss is divided by the count of the whole step
        self._start_anew()

    def _start_anew(self) -> None:
        self.metrics = Metrics()
        self.progress = state.Progress()
        self._records: list[dict[str, Any]] = []  # of the last rollout, for log_completions
        self._updated: list[ScoredBatch] = []  # of the present rollout, for compute_post_kl

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trainer's; what an earlier call left (a rollout half used, counts, a window) plays no part."""
        self._start_anew()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def scored_batch(self, rows: list[Row]) -> ScoredBatch:
        """Everything before the update of the policy."""
        raise NotImplementedError

    def rollout_and_scores(self, rows: list[Row], *stream: int) -> tuple[Rollout, Tensor, Tensor | None]:
        """Completions for `rows` and what teacher (B, T) and reward functions (B, F) think of them."""
        raise NotImplementedError

    # ---- Batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Row]], num_batches: int, device: torch.device
    ) -> tuple[list[ScoredBatch], Tensor | None]:
        """The next optimizer step's micro-batches and their global item count; rolls out when none are left."""
        self.progress.skip_rolled_out(epoch_iterator)
        if not self.progress.pending:
            self.progress.pending.extend(self._next_steps(epoch_iterator, num_batches))
        return self.progress.pending.popleft() if self.progress.pending else ([], None)

    def _next_steps(self, epoch_iterator: Iterator[list[Row]], num_batches: int) -> list[state.Step]:
        """Rolls out `num_substeps` optimizer steps at once and cuts them into micro-batches; a group stays in one step."""
        num_steps = min(self.args.num_substeps, self.state.max_steps - self.state.global_step)
        batches = list(islice(epoch_iterator, num_batches * num_steps))
        rows = [row for batch in batches for row in batch]
        checks.check_first_rows(rows, self.state.global_step, self.args)
        if isinstance(self.train_dataset, datasets.IterableDataset):
            # Trainer never ends a step that a stream's end cuts short: its gradient would be part of the next pass's first
            batches = batches[: len(batches) // num_batches * num_batches]
            rows = [row for batch in batches for row in batch]
        if not rows:
            return []
        micro_batches = self.scored_batch(rows).split([len(batch) for batch in batches])
        self._updated = micro_batches if self.args.compute_post_kl else []
        parts = [micro_batches[i : i + num_batches] for i in range(0, len(micro_batches), num_batches)]
        return [(part, self._count_items(part)) for part in parts]

    def _count_items(self, micro_batches: list[ScoredBatch]) -> Tensor:
        counts = [count_items(batch.mask_BT, self.args.loss_reduction) for batch in micro_batches]
        return cast(Tensor, self.accelerator.reduce(torch.stack(counts).sum(), reduction="sum"))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(dataset, datasets.Dataset):
            return None
        return PromptSampler(
            len(dataset),
            repeats=self.args.num_generations,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's, timed."""
        with self.metrics.timed("train"):
            return super().training_step(model, inputs, num_items_in_batch)

    # ---- Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Rolls out and scores the evaluation data, then calls the evaluators; training is not disturbed.

        Args:
            eval_dataset: In place of the trainer's own; then the evaluators are not called.
            ignore_keys: Unused.
            metric_key_prefix: First part of each figure's name.
        """
        with self._other_metrics(), forked_rng(), eval_mode(self.model):
            if eval_dataset is not None:
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            figures = super().evaluate(None, ignore_keys, metric_key_prefix) if self.eval_dataset else {}
            results = [evaluator(self) for evaluator in self.evaluators]
        own = {f"{metric_key_prefix}_{name}": value for result in results for name, value in result.items()}
        if own:
            self.log(dict(own))
        if self.evaluators:
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, own)
        return figures | own

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One completion for each prompt, the same random stream each time, so that figures of different steps compare."""
        num_rows = 0
        with self._other_metrics() as metrics:
            for number, rows in enumerate(dataloader):
                self.rollout_and_scores(rows, EVAL, number)
                num_rows += len(rows)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            figures = metrics.reduce()
        figures = {name: value for name, value in figures.items() if "time/" not in name and "tokens" not in name}
        named = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        return EvalLoopOutput(predictions=np.empty(0), label_ids=None, metrics=named, num_samples=num_rows)

    @contextmanager
    def _other_metrics(self) -> Iterator[Metrics]:
        """Inside, what is measured goes to a window of its own, which this gives; training's own learns `time/eval` only."""
        outer, self.metrics = self.metrics, Metrics()
        try:
            with outer.timed("eval"):
                yield self.metrics
        finally:
            self.metrics = outer

    # ---- Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures of the window to each training log."""
        if "loss" in logs:
            logs |= self._window_figures()
            if self._records and self.is_world_process_zero():
                completions.write_completions(self._records, str(self.args.output_dir))
                completions.print_completions(self._records)
            self._records = []
        super().log(logs, start_time)

    def _window_figures(self) -> dict[str, float]:
        figures = self.metrics.reduce()
        tokens, seconds = figures.pop("tokens", 0.0), figures.pop("time/window") - figures.get("time/eval", 0.0)
        self.progress.tokens += tokens
        self.progress.teacher_tokens += figures.pop("teacher_tokens", 0.0)
        totals = {"tokens": self.progress.tokens, "teacher_tokens": self.progress.teacher_tokens}
        return figures | totals | {"tokens_per_second": tokens / seconds}

    def _record_post_kl(self) -> None:
        """After a rollout's last update: how far its updates moved the policy on its own tokens."""
        if self.progress.pending or not self._updated:
            return
        with eval_mode(self.model):
            for batch in self._updated:
                change_BT = batch.sampled_logps_BT - self.student_logps(batch)
                change, count = change_BT[batch.mask_BT], batch.mask_BT.sum()
                self.metrics.add("update_kl/v1", change.sum(), count)
                self.metrics.add("update_kl/v2", change.square().sum() / 2, count)
        self._updated = []

    def floating_point_ops(self, inputs: Any) -> int:
        """Trainer's estimate for the training pass; rollout and scoring are not counted."""
        return super().floating_point_ops({"input_ids": inputs.ids_BT})

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens({"input_ids": inputs.ids_BT, "attention_mask": inputs.attention_mask_BT})

    # ---- Checkpoints and the Hub

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
        window = self.metrics.totals()
        progress = replace(
            self.progress,
            tokens=self.progress.tokens + window.get("tokens", 0.0),
            teacher_tokens=self.progress.teacher_tokens + window.get("teacher_tokens", 0.0),
            position=self._stream_position(),
        )
        progress.save(folder, self.accelerator.process_index)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.progress = state.Progress.load(resume_from_checkpoint, self.accelerator.process_index, self.args.device)

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
        state_dict = state_without_adapter(self.student(), TEACHER_ADAPTER, state_dict)
        with without_adapter(self.student(), TEACHER_ADAPTER):
            super()._save(output_dir, state_dict)

    def create_model_card(  # pyright: ignore[reportIncompatibleMethodOverride] - Trainer and TRL call it by keyword
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
        if not self.is_world_process_zero():
            return
        student = self.student()
        facts = CardFacts(
            name=self.hub_model_id or model_name or Path(str(self.args.output_dir)).resolve().name,
            student=self.student_name,
            teacher=self.teacher_name,
            objective=self.args.objective(),
            lora=student.active_peft_config if isinstance(student, PeftModel) else None,
            datasets=[*_listed(dataset), *_listed(dataset_name)],
            num_prompts=len(self.train_dataset) if isinstance(self.train_dataset, datasets.Dataset) else None,
            history=self.state.log_history,
            tags=_listed(tags),
            metadata=metadata,
        )
        model_card(facts).save(f"{self.args.output_dir}/README.md")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, but the model is saved in `output_dir` before the Hub is asked for anything.

        Raises:
            RuntimeError: If the Hub cannot be reached or does not take the push.
        """
        self.save_model(_internal_call=True)
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

    # ---- The student

    def student(self) -> PreTrainedModel | PeftModel:
        """The model that is trained, out of its wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def student_logps(self, sequences: Rollout | ScoredBatch) -> Tensor:
        """(B, T) log-probs under the student as it is now, without gradient."""
        with eval_mode(self.model):
            return score_in_batches(
                self.model_wrapped,
                sequences.ids_BT,
                sequences.attention_mask_BT,
                temperature=self.args.temperature,
                vocab_size=self.vocab_size,
                batch_size=self.args.per_device_train_batch_size,
            )


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
