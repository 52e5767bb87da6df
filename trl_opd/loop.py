"""How on-policy distillation fits into the training loop of `transformers.Trainer`: its batches, evaluation and logs.

What is computed is not here: `trainer.py` turns dataset rows into a `ScoredBatch`, and that into a loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProgressCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from . import checks, processes, state
from .alarms import AlarmCallback
from .batch import Rollout, ScoredBatch, TeacherStates
from .callbacks import CompletionsCallback, DistillationProgressCallback, RolloutCallback, StopOnSignals
from .command_line import shown
from .comparison import compare
from .divergence import check_divergence
from .layout import Layout
from .linear_head import Policy
from .logprobs import score, score_in_batches, score_tokens
from .metrics import Metrics
from .models import eval_mode
from .prompt_sharing import prompt_sharing
from .report.recorder import ReportCallback
from .rewards import reward_advantages
from .rng import forked_rng
from .rows import Filler
from .servers import ServerError
from .steps import EVAL, SteppingTrainer
from .teachers import ModelTeacher, ServerTeacher, Teacher, divergences, rows_by_teacher, teachers_of
from .tracing import TraceCallback

Scored = tuple[Rollout, Tensor, Tensor, TeacherStates | None]
"""A rollout, the teacher's log-probs of it (B, T), rewards (B, F) and, of a dense objective, the teachers' hidden states."""


class DistillationLoop(SteppingTrainer):
    """The part of the trainer that is not the algorithm, split off by topic; subclass `OnPolicyDistillationTrainer`."""

    processing_class: PreTrainedTokenizerBase
    teacher: Teacher
    evaluators: list[Callable[[Any], dict[str, float]]]
    vocab_size: int
    prepare_eval: Callable[[Any], Any]
    """Checks evaluation data, and gives each row its teacher's name."""
    reward_weights: list[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        processes.check_launch(self.accelerator)
        self.loss_is_scaled_for_ga = True  # the loss is divided by the count of the whole step
        if (theirs := self.pop_callback(JITCheckpointCallback)) is not None:
            theirs.on_train_end(self.args, self.state, self.control)  # it listens already
            self.add_callback(StopOnSignals(self.any_process))
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(DistillationProgressCallback)
        self.add_callback(AlarmCallback)
        if self.args.log_completions:
            self.add_callback(CompletionsCallback)
        if self.args.report:
            self.add_callback(ReportCallback)
        self.command = shown(sys.argv)  # now: a file of settings may be another by the end
        if self.args.trace_steps:
            self._traces = TraceCallback(self.args.trace_steps)
            self.add_callback(self._traces)
        self._start_anew()

    def _start_anew(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
        self._ahead = None
        self.metrics = Metrics()
        self.progress = state.Progress()
        self._updated: list[ScoredBatch] = []
        self._sampled_now = False  # whether no update has come since the last rollout of training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trainer's; what an earlier call left (a rollout half used, counts, a window) plays no part.

        Raises:
            ServerError: If a server was lost for good. What was trained until then is saved as a checkpoint.
        """
        self._start_anew()
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except ServerError as error:
            raise ServerError(f"{error} {self.saved_for_later(trial)}") from error

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all must call this."""
        return bool(cast(Tensor, self.accelerator.reduce(torch.tensor(int(flag), device=self.args.device))))

    def _prepare_teacher(self, model: nn.Module) -> nn.Module:
        return processes.prepare_frozen(model, self.accelerator, stays=self.args.teacher_offload)

    def rollout_and_scores(self, rows: list[dict[str, Any]], *stream: int) -> Scored:
        """Completions for `rows` and what teacher and reward functions say of them."""
        raise NotImplementedError

    def student_logps(self, sequences: Rollout | ScoredBatch) -> Tensor:
        """(B, T) log-probs of the action tokens under the student as it is now, without gradient; 0 elsewhere."""
        with eval_mode(self.model):
            return score_in_batches(
                self.model_wrapped,
                sequences.ids_BT,
                sequences.attention_mask_BT,
                sequences.mask_BT,
                temperature=self.args.temperature,
                vocab_size=self.vocab_size,
                batch_size=self.args.per_device_train_batch_size,
                max_tokens=self.args.max_tokens_per_micro_batch,
            )

    def student_scores(self, model: nn.Module, batch: ScoredBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs of the action tokens, entropies and, of a dense objective, divergences from the teacher: (B, T) each."""
        tokens = batch.ids_BT, batch.attention_mask_BT, batch.mask_BT
        policy, divergence = Policy(self.args.temperature, self.vocab_size), self.args.divergence
        if divergence is None:
            settings: dict[str, Any] = {"temperature": policy.temperature, "vocab_size": policy.vocab_size}
            return *score_tokens(model, *tokens, rows=batch.rows, **settings), None
        layout = Layout.of(*tokens, prompt_sharing(model), batch.rows)
        scorer = divergences(self.teacher, batch, layout, policy, divergence)
        logps_BT, entropy_BT, divergence_BT = score(model, layout, scorer)
        found, count = divergence_BT.detach()[batch.mask_BT], batch.mask_BT.sum()
        check_divergence(found, divergence.direction)
        self.metrics.add("divergence", found.sum(), count)
        return logps_BT, entropy_BT, divergence_BT

    def _with_logps(self, rollout: Rollout) -> Rollout:
        """The rollout with the student's own log-probs where a user's loop gave none (NaN); all processes must call this."""
        missing_BT = rollout.sampled_logps_BT.isnan()
        if not self.any_process(bool(missing_BT.any())):
            return rollout
        return rollout.with_sampled_logps(torch.where(missing_BT, self.student_logps(rollout), rollout.sampled_logps_BT))

    def _reward_advantages(self, rewards_BF: Tensor) -> Tensor:
        """(B,) of this process, centred and scaled among the rewards of all, each of which must call this."""
        shares = gather_object([rewards_BF])
        start = sum(len(share) for share in shares[: self.accelerator.process_index])
        advantages = reward_advantages(
            torch.cat(shares), self.reward_weights, self.args.num_generations, self.args.scale_rewards
        )
        return advantages[start : start + len(rewards_BF)]

    def compare_engine(self, logps_BT: Tensor, batch: ScoredBatch) -> None:
        """Compares a rollout's log-probs with the trainer's own of the same weights; all processes must call this."""
        self._sampled_now = False
        gap_BT = torch.where(batch.mask_BT, (logps_BT - batch.sampled_logps_BT).abs(), 0.0)
        sums = torch.stack([gap_BT.sum(), batch.mask_BT.sum().to(gap_BT)])
        gap, count = cast(Tensor, self.accelerator.reduce(sums)).tolist()
        if count:
            checks.check_engine_agrees(gap / count, self.engine.max_gap, self.state.global_step)

    def judge_first_rollout(self, rollout: Rollout, teacher_logps_BT: Tensor) -> None:
        """Says in words whether student and teacher fit, as far as a rollout before the first update shows."""
        for name, own_B in rows_by_teacher(self.teacher, rollout).items():
            comparison = compare(rollout[own_B], teacher_logps_BT[own_B], self.vocab_size)
            for verdict in comparison.verdicts(self.args.max_completion_length, half_precision=self.half_precision()):
                checks.warn(f"Teacher {name!r}: {verdict}" if name else verdict)

    def half_precision(self) -> bool:
        """Whether student or teacher computes in 16 bits."""
        models = [self.student(), *(t.model for t in teachers_of(self.teacher) if isinstance(t, ModelTeacher))]
        halves = (torch.bfloat16, torch.float16)
        on_server = any(isinstance(t, ServerTeacher) for t in teachers_of(self.teacher))  # which does not say; most have bf16
        return on_server or self.args.bf16 or self.args.fp16 or any(p.dtype in halves for m in models for p in m.parameters())

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
                if isinstance(eval_dataset, dict):
                    eval_dataset = self.prepare_eval(eval_dataset)
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
        processes.ensure_sharded(self.student(), self.accelerator)
        num_rows, size = 0, self.args.per_device_eval_batch_size
        with self._other_metrics() as metrics:
            for number, batch in enumerate(dataloader):
                rows = self.with_seeds(batch, self._eval_shares, number * size, EVAL)
                self.rollout_and_scores(rows, EVAL, number)
                num_rows += sum(not isinstance(row, Filler) for row in rows)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            figures = metrics.reduce()
        of_training = {"tokens", "teacher_tokens"}
        figures = {name: v for name, v in figures.items() if name not in of_training and not name.startswith("time/")}
        named = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        return EvalLoopOutput(
            predictions=np.empty(0), label_ids=None, metrics=named, num_samples=sum(gather_object([num_rows]))
        )

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
            logs = logs | self._window_figures()
        super().log(logs, start_time)

    def _window_figures(self) -> dict[str, float]:
        figures = self.metrics.reduce()
        tokens, seconds = figures.pop("tokens", 0.0), figures.pop("time/window") - figures.get("time/eval", 0.0)
        self.progress.tokens += tokens
        self.progress.teacher_tokens += figures.pop("teacher_tokens", 0.0)
        totals = {"tokens": self.progress.tokens, "teacher_tokens": self.progress.teacher_tokens}
        return figures | totals | {"tokens_per_second": tokens / seconds}

    def after_rollout(self, rollout: Rollout, batch: ScoredBatch) -> None:
        """Shows a rollout of training, with its scores, to the callbacks that look at rollouts."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RolloutCallback):
                callback.on_rollout(self.args, self.state, self.control, rollout=rollout, batch=batch, trainer=self)

    def after_step(self) -> None:
        """After each optimizer step, before it is logged or saved."""
        for teacher in self.self_teachers():
            teacher.follow(self.state.global_step)
        self._record_post_kl()

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
