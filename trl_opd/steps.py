"""Which rows make an optimizer step, on which process, and when their completions are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import datasets
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from . import checks, processes, state
from .batch import Rollout, ScoredBatch
from .layout import pass_limit, plan_passes
from .loss import count_items
from .mixing import MixedSampler, NamedRows, make_mixture
from .overlap import Draft, Written
from .prompt_sharing import prompt_sharing
from .rollout import RolloutEngine
from .rows import FilledStream, RowSampler, SampledRows, Shares, with_seeds
from .saving import SavingTrainer
from .tracing import TraceCallback

TRAIN, EVAL = 0, 1
"""Random streams of rollouts."""


class SteppingTrainer(SavingTrainer):
    """A Trainer whose optimizer steps are parts of a rollout, which was written just before, or while another trained."""

    engine: RolloutEngine
    _ahead: Draft | None = None
    """The rollout after the present one, under way (`rollout_lag`)."""
    _traces: TraceCallback | None = None
    _updated: list[ScoredBatch]
    """Of the present rollout, for `compute_post_kl`."""

    def scored_batch(self, rows: list[dict[str, Any]], written: Written | None = None) -> ScoredBatch:
        """Everything before the update of the policy."""
        raise NotImplementedError

    def write_ahead(self, rows: list[dict[str, Any]]) -> Written:
        """Completions for `rows`, and what servers say of them, in another thread."""
        raise NotImplementedError

    def student_logps(self, sequences: Rollout | ScoredBatch) -> Tensor:
        """(B, T) log-probs of the action tokens under the student as it is now, without gradient; 0 elsewhere."""
        raise NotImplementedError

    # ---- Steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[dict[str, Any]]], num_batches: int, device: torch.device
    ) -> tuple[list[ScoredBatch], Tensor | None]:
        """The next optimizer step's micro-batches and their global item count; rolls out when none are left."""
        if self._traces is not None:
            self._traces.begin(self)
        self.progress.skip_rolled_out(epoch_iterator)
        if not self.progress.pending:
            self.progress.pending.extend(self._next_steps(epoch_iterator, num_batches))
        if not self.progress.pending:
            return [], None
        self.metrics.add("rollout/staleness", self.state.global_step - self.progress.sampled_at)
        return self.progress.pending.popleft()

    def _next_steps(self, epoch_iterator: Iterator[list[dict[str, Any]]], num_batches: int) -> list[state.Step]:
        """Rolls out `num_substeps` optimizer steps at once and cuts them into micro-batches; a group stays in one step."""
        draft = self._ahead or self._draft(epoch_iterator, num_batches, self.state.global_step)
        self._ahead = None
        if draft is None:
            return []
        written = None
        if self.args.rollout_lag:
            self._begin(draft)
            with self.metrics.timed("rollout"), processes.served():
                written = draft.written()
            steps = math.ceil(len(draft.batches) / num_batches)
            self._ahead = self._draft(epoch_iterator, num_batches, draft.step + steps)
            self._begin(self._ahead)
        self.progress.sampled_at = draft.step if draft.sampled_at is None else draft.sampled_at
        micro_batches = self.scored_batch(draft.rows, written).split([len(batch) for batch in draft.batches])
        self._updated = micro_batches if self.args.compute_post_kl else []
        if self.args.rollout_lag:  # its updates begin later than the rollout
            self._updated = [replace(batch, sampled_logps_BT=self.student_logps(batch)) for batch in self._updated]
        parts = [micro_batches[i : i + num_batches] for i in range(0, len(micro_batches), num_batches)]
        return [(part, self._count_items(part)) for part in parts]

    def _draft(self, epoch_iterator: Iterator[list[dict[str, Any]]], num_batches: int, step: int) -> Draft | None:
        """The rows of the rollout for `step` and, with substeps, those after; None at the end of the data or of training."""
        num_steps = max(0, min(self.args.num_substeps, self.state.max_steps - step))
        batches = list(islice(epoch_iterator, num_batches * num_steps))
        draft = Draft(batches, step)
        checks.check_first_rows(draft.rows, step, self.args)
        if isinstance(self.train_dataset, datasets.IterableDataset):
            # Trainer never ends a step that a stream's end cuts short: its gradient would be part of the next pass's first
            draft = Draft(batches[: len(batches) // num_batches * num_batches], step)
        return draft if draft.rows else None

    def _begin(self, draft: Draft | None) -> None:
        """Has another thread write the draft's completions, from the weights as they are now, unless it does already."""
        if draft is not None and draft.sampled_at is None:
            self.sync_engine()
            rows = self.with_seeds(draft.rows, self.train_shares, 0, TRAIN, draft.step)
            draft.begin(lambda: self.write_ahead(rows), self.state.global_step)

    def sync_engine(self) -> None:
        """Gives the engine the weights as they are now; all processes must call this."""
        with self.metrics.timed("sync"), self.accelerator.autocast():
            if self._ahead is not None:
                with processes.served():  # no process has a request open that names the weights before
                    self._ahead.wait()
            self.engine.sync(self.student())

    def _count_items(self, micro_batches: list[ScoredBatch]) -> Tensor:
        counts = [count_items(batch.mask_BT, self.args.loss_reduction) for batch in micro_batches]
        return cast(Tensor, self.accelerator.reduce(torch.stack(counts).sum(), reduction="sum"))

    # ---- Rows

    @property
    def train_shares(self) -> Shares:
        """How the rows of an epoch or a rollout are dealt to the processes."""
        return Shares(self.accelerator.num_processes, self.args.per_device_train_batch_size, self.args.num_generations)

    def with_seeds(self, rows: list[dict[str, Any]], shares: Shares, first: int, *stream: int) -> list[dict[str, Any]]:
        """This process's rows, `first` and those after, each with a seed that depends on its place among all only."""
        numbers = range(first, first + len(rows))
        places = [shares.place(self.accelerator.process_index, number) for number in numbers]
        return with_seeds(rows, places, self.args.seed, *stream)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        rows = dataset
        if isinstance(dataset, datasets.Dataset | NamedRows):
            rows = SampledRows(dataset)
        elif self.accelerator.num_processes > 1:
            rows = FilledStream(dataset, self.accelerator.num_processes * batch_size)
        loader = super()._get_dataloader(rows, description, batch_size, *args, **kwargs)
        if isinstance(shard := loader.batch_sampler, BatchSamplerShard):
            shard.sampler = shard.batch_sampler.sampler  # or a resumed loader would not tell it which epoch it is
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        shuffle, shares = self.args.train_sampling_strategy == "random", self.train_shares
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(self.train_dataset, NamedRows):
            return MixedSampler(make_mixture(self.train_dataset.sizes, self.args), shares, shuffle=shuffle, seed=seed)
        return RowSampler(len(train_dataset), shares, shuffle=shuffle, seed=seed, drop_last=self.args.dataloader_drop_last)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int]:
        return RowSampler(len(eval_dataset), self._eval_shares, shuffle=False, drop_last=self.args.dataloader_drop_last)

    @property
    def _eval_shares(self) -> Shares:
        return Shares(self.accelerator.num_processes, self.args.per_device_eval_batch_size)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's, timed, in as many parts as make little padding; all processes make the same number."""
        with self.metrics.timed("train"):
            losses = []
            parts: list[Any] = self._parts(model, inputs) if isinstance(inputs, ScoredBatch) else [inputs]
            for number, part in enumerate(parts, start=1):
                # FSDP reduces the gradients of each part: without, it would hold whole ones on each process
                alone = isinstance(model, DistributedDataParallel) and number < len(parts)
                with cast(DistributedDataParallel, model).no_sync() if alone else nullcontext():
                    losses.append(super().training_step(model, part, num_items_in_batch))
            return torch.stack(losses).sum()

    def _parts(self, model: nn.Module, batch: ScoredBatch) -> list[ScoredBatch]:
        """Of a micro-batch, the rows for each forward and backward pass."""
        tokens = batch.ids_BT, batch.attention_mask_BT, batch.mask_BT
        limit = pass_limit(batch.attention_mask_BT, len(batch), self.args.max_tokens_per_micro_batch)
        passes = plan_passes(*tokens, prompt_sharing(model), limit)
        return [batch.part(rows) for rows in processes.evened(passes, model)]
