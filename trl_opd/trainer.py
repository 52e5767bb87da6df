"""The trainer: `compute_loss` is the algorithm; `loop.py` fits it into `transformers.Trainer`.

How this differs from the textbook, and from TRL's trainers:
1. The completions of a whole optimizer step (of `num_substeps` of them) are sampled and scored at once, in
   `get_batch_samples`, where Trainer fetches a step's micro-batches: the number of action tokens of the step is known
   before its first backward pass, and the loss does not depend on how the step is cut up.
2. Rollouts draw from a random stream of their own, seeded by (seed, step, process): evaluating more or less often, or
   resuming, changes no completion.
3. Dropout is off: the importance ratio compares the same function of the weights at two times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import datasets
import torch
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import checks, completions
from .advantage import kl_advantages
from .batch import Rollout, ScoredBatch
from .callbacks import AfterStepCallback, DistillationProgressCallback
from .comparison import compare
from .config import OnPolicyDistillationConfig, as_dict
from .logprobs import score_in_batches, score_tokens
from .loop import TRAIN, DistillationLoop
from .loss import Stats, policy_loss
from .metrics import record_rewards, record_rollout, record_update
from .models import base_name, eval_mode, load_student, load_tokenizer
from .processes import prepare_frozen
from .prompts import PromptEncoder, check_dataset
from .rewards import RewardFunc, compute_rewards, reward_advantages, reward_names, weighted_rewards
from .rng import forked_rng
from .rollout import RolloutEngine, TransformersEngine
from .rows import Filler, Row, repeat_rows
from .teachers import ModelTeacher, Teacher, make_teacher

Evaluator = Callable[["OnPolicyDistillationTrainer"], dict[str, float]]


class OnPolicyDistillationTrainer(DistillationLoop):
    """Distils a teacher into a student on the student's own completions, by policy gradient.

    To change one step of the algorithm, override one of `generate_rollout`, `score_with_teacher`, `compute_advantages` and
    `compute_policy_loss`.

    Args:
        model: The student: an id or path (of an adapter, too: it is trained on), a model, or a PeftModel.
        teacher_model: The teacher: an id, a path or a model, or "base" for the student's own base with its adapter off, which
            takes no memory. Unset: `args.teacher_model_name_or_path`.
        args: Settings.
        train_dataset: Has a `prompt` column, texts or lists of messages; other columns go to the reward functions. Where
            it has a `teacher_prompt`, the teacher sees that in place of the prompt (privileged context).
        eval_dataset: One such dataset or a dict of them: held-out teacher_kl, completion and reward figures.
        processing_class: The student's tokenizer; by default the one saved with it. If it has no pad token, it gets one.
        callbacks: As for `Trainer`.
        optimizers: As for `Trainer`.
        quantization_config: Loads a student given by name quantised (QLoRA, together with `peft_config`).
        peft_config: Adapter to train in place of the student's weights.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`; mixed into the advantage.
        evaluators: Called with the trainer at each evaluation; the figures they return are logged as `eval_<name>`.

    Raises:
        ValueError: If something does not fit together; the message says what was found and what to do.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        teacher_model: str | PreTrainedModel | PeftModel | None = None,
        args: OnPolicyDistillationConfig | None = None,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
        eval_dataset: datasets.Dataset | datasets.IterableDataset | dict[str, datasets.Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: QuantizationConfigMixin | None = None,
        peft_config: PeftConfig | None = None,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        evaluators: list[Evaluator] | None = None,
    ) -> None:
        args = args or OnPolicyDistillationConfig()
        teacher_model = checks.teacher_given(teacher_model, args)
        checks.check_sampling(args)
        checks.check_devices(args.n_gpu)
        self.student_name = model if isinstance(model, str) else base_name(model)
        loaded_here = isinstance(model, str)
        set_seed(args.seed)  # adapters start at random
        model = load_student(model, args, quantization_config, peft_config)
        tokenizer = checks.prepare_tokenizer(processing_class or load_tokenizer(self.student_name, args))
        self.vocab_size = checks.policy_vocab_size(tokenizer)
        checks.check_vocab_rows(model, self.vocab_size, "student")
        self.prompt_encoder = PromptEncoder(tokenizer, as_dict(args.chat_template_kwargs), checks.prompt_limit(model, args))
        self.reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or [])
        self.reward_weights = checks.reward_weights(args, len(self.reward_funcs))
        self.evaluators = list(evaluators or [])
        eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
        for name, dataset in eval_datasets.items():
            if dataset is not None:
                check_dataset(dataset, name)
        if eval_dataset is None and self.evaluators:
            eval_dataset = {}  # nothing to roll out, but Trainer must not refuse to evaluate
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=None if train_dataset is None else self._prepared(train_dataset, args),
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[AfterStepCallback(self._record_post_kl), *(callbacks or [])],
            optimizers=optimizers,
        )
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(DistillationProgressCallback)
        self.engine: RolloutEngine = TransformersEngine(
            args,
            stop_ids=checks.stop_token_ids(model, tokenizer),
            pad_id=cast(int, tokenizer.pad_token_id),
            vocab_size=self.vocab_size,
            synced_gpus=self.is_fsdp_enabled,
        )
        self._engine_checked = False
        self.teacher_name = teacher_model if isinstance(teacher_model, str) else base_name(teacher_model)
        self.teacher: Teacher = make_teacher(
            teacher_model, self.student, tokenizer, args, self._prepare_teacher, may_share_base=loaded_here
        )

    # ---- The algorithm

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """On-policy distillation. Dataset rows are rolled out and scored first; a scored micro-batch goes on from there.

        Args:
            model: The student as it is wrapped for training.
            inputs: Dataset rows, or a micro-batch from `get_batch_samples`.
            return_outputs: Whether to return the (B, T) current log-probs too.
            num_items_in_batch: What the reduction divides by, counted over the whole optimizer step and all processes. None:
                over these inputs on this process.

        Returns:
            The scalar loss, whose gradient averaged over processes is that of the whole step.
        """
        batch = inputs if isinstance(inputs, ScoredBatch) else self.scored_batch(inputs)

        tokens = batch.ids_BT, batch.attention_mask_BT, batch.mask_BT
        settings = {"temperature": self.args.temperature, "vocab_size": self.vocab_size}
        logps_BT, entropy_BT = score_tokens(model, *tokens, **settings)
        if self.state.global_step == 0 and not self._engine_checked:
            checks.check_engine_agrees(logps_BT, batch)
            self._engine_checked = True
        if self.args.kl_logps == "current":
            advantages_BT = self.compute_advantages(
                logps_BT.detach(), batch.teacher_logps_BT, batch.mask_BT, batch.reward_advantages_B
            )
            batch = replace(batch, advantages_BT=advantages_BT)
        loss, stats = self.compute_policy_loss(logps_BT, batch, num_items_in_batch)

        record_update(self.metrics, batch, logps_BT, entropy_BT, stats)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, the count is global
        return (loss, {"logps": logps_BT}) if return_outputs else loss

    def scored_batch(self, rows: list[dict[str, Any]]) -> ScoredBatch:
        """Everything before the update: rollout, teacher, rewards, advantages."""
        rows = self.with_seeds(rows, self.train_shares, 0, TRAIN, self.state.global_step)
        rollout, teacher_logps_BT, rewards_BF = self.rollout_and_scores(rows, TRAIN, self.state.global_step)
        if self.state.global_step == 0:
            comparison = compare(rollout, teacher_logps_BT, self.vocab_size)
            limits = {"max_completion_length": self.args.max_completion_length, "half_precision": self._half_precision()}
            for verdict in comparison.verdicts(**limits):
                checks.warn(verdict)
        reward_advantages_B = self._reward_advantages(rewards_BF).to(rollout.sampled_logps_BT)
        advantages_BT = self.compute_advantages(
            rollout.sampled_logps_BT, teacher_logps_BT, rollout.mask_BT, reward_advantages_B
        )
        checks.check_advantages(advantages_BT)
        batch = ScoredBatch.of(rollout, teacher_logps_BT, reward_advantages_B, advantages_BT)
        if self.args.log_completions:
            self._records = completions.completion_records(rollout, batch, self.processing_class, self.state.global_step + 1)
        return batch

    def rollout_and_scores(self, rows: list[dict[str, Any]], *stream: int) -> tuple[Rollout, Tensor, Tensor]:
        """Completions for `rows`, the teacher's log-probs of them (B, T) and their rewards (B, F); all are measured."""
        with self.metrics.timed("rollout"), forked_rng(self.args.seed, *stream, self.accelerator.process_index):
            rollout = self.generate_rollout(rows)
        checks.check_rollout(rollout, len(rows))
        rollout, real_B = rollout.without_fillers(), rollout.real_B
        with self.metrics.timed("teacher"):
            teacher_logps_BT = self.score_with_teacher(rollout)
        checks.check_scores(rollout, teacher_logps_BT, self.args.kl_clip)
        ids = rollout.completion_ids()
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        rewards_BF = compute_rewards(self.reward_funcs, rollout.rows, texts, ids, trainer_state=self.state)
        rewards_BF[~real_B.cpu()] = torch.nan

        record_rollout(self.metrics, rollout[real_B], teacher_logps_BT[real_B])
        totals_B = weighted_rewards(rewards_BF, self.reward_weights)
        record_rewards(self.metrics, rewards_BF, totals_B, reward_names(self.reward_funcs))
        return rollout, teacher_logps_BT, rewards_BF

    # ---- Its four steps, for subclasses

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        """Lets the student write one completion for each row; rows of a group follow each other."""
        seeds = [row.seed for row in rows if isinstance(row, Row) and row.seed is not None]
        prompts = [self.prompt_encoder.encode(row) for row in rows]
        kept = [self.prompt_encoder.truncate(prompt) for prompt in prompts]
        cut = [
            len(prompt) > len(rest)
            for prompt, rest, row in zip(prompts, kept, rows, strict=True)
            if not isinstance(row, Filler)
        ]
        self.metrics.add("prompts/truncated_fraction", sum(cut), len(cut))
        with self.accelerator.autocast():  # `generate` of an adapted model does not pass the wrapper that training is cast by
            generated = self.engine.generate(self.student(), kept, seeds if len(seeds) == len(rows) else None)
        return Rollout.build(
            kept,
            generated,
            rows,
            pad_id=cast(int, self.processing_class.pad_token_id),
            device=self.args.device,
            teacher_prompts=self._teacher_prompts(rows),
            mask_truncated=self.args.mask_truncated_completions,
        )

    def score_with_teacher(self, rollout: Rollout) -> Tensor:
        """(B, T) nats: the teacher's log-prob of each token the student wrote."""
        return self.teacher.score(rollout)

    def compute_advantages(
        self, student_logps_BT: Tensor, teacher_logps_BT: Tensor, mask_BT: Tensor, reward_advantages_B: Tensor
    ) -> Tensor:
        """(B, T), detached, 0 off the mask: the negative reverse KL of each token plus its completion's reward advantage."""
        kl_term_BT = kl_advantages(
            student_logps_BT,
            teacher_logps_BT,
            mask_BT,
            coef=self.args.kl_penalty_coef,
            discount=self.args.kl_discount_factor,
            clip=self.args.kl_clip,
        )
        return torch.where(mask_BT, kl_term_BT + reward_advantages_B[:, None], 0.0)

    def compute_policy_loss(
        self, logps_BT: Tensor, batch: ScoredBatch, num_items: Tensor | int | None
    ) -> tuple[Tensor, Stats]:
        """The loss of a micro-batch, divided by `num_items`, and sums for metrics; see `policy_loss`."""
        return policy_loss(
            logps_BT,
            batch.sampled_logps_BT,
            batch.advantages_BT,
            batch.mask_BT,
            loss_fn=self.args.loss_fn,
            loss_fn_config=as_dict(self.args.loss_fn_config),
            reduction=self.args.loss_reduction,
            num_items=num_items,
        )

    # ---- Parts

    def _reward_advantages(self, rewards_BF: Tensor) -> Tensor:
        """(B,) of this process, centred and scaled among the rewards of all, each of which must call this."""
        shares = gather_object([rewards_BF])
        start = sum(len(share) for share in shares[: self.accelerator.process_index])
        advantages = reward_advantages(
            torch.cat(shares), self.reward_weights, self.args.num_generations, self.args.scale_rewards
        )
        return advantages[start : start + len(rewards_BF)]

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
            )

    def _half_precision(self) -> bool:
        """Whether student or teacher computes in 16 bits."""
        models = [self.student(), *([self.teacher.model] if isinstance(self.teacher, ModelTeacher) else [])]
        halves = (torch.bfloat16, torch.float16)
        return self.args.bf16 or self.args.fp16 or any(p.dtype in halves for m in models for p in m.parameters())

    def _teacher_prompts(self, rows: list[dict[str, Any]]) -> list[list[int]] | None:
        if not any("teacher_prompt" in row for row in rows):
            return None
        return [self.prompt_encoder.encode(row, "teacher_prompt") for row in rows]

    def _prepare_teacher(self, model: nn.Module) -> nn.Module:
        return prepare_frozen(model, self.accelerator)

    def _prepared(self, dataset: Any, args: OnPolicyDistillationConfig) -> Any:
        """The training data, checked; long prompts dropped if so configured; a stream's rows repeated into groups."""
        dataset = check_dataset(dataset, "train_dataset")
        if args.long_prompts == "drop":
            dataset = checks.drop_long_prompts(dataset, self.prompt_encoder)
        if isinstance(dataset, datasets.IterableDataset):
            checks.check_stream_groups(args, args.world_size)
            return repeat_rows(dataset, args.num_generations)
        checks.check_step_has_rows(len(dataset), args, args.world_size)
        return dataset
