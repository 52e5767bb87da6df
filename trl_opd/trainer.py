"""The trainer: `compute_loss` is the algorithm; `loop.py` and `steps.py` fit it into `transformers.Trainer`.

How this differs from the textbook, and from TRL's trainers:
1. The completions of a whole optimizer step (of `num_substeps` of them) are sampled and scored at once, in
   `get_batch_samples`, where Trainer fetches a step's micro-batches: the number of action tokens of the step is known
   before its first backward pass, and the loss does not depend on how the step is cut up.
2. Rollouts draw from a random stream of their own, seeded by (seed, step, process): evaluating more or less often, or
   resuming, changes no completion.
3. Dropout is off: the importance ratio compares the same function of the weights at two times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import datasets
import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import checks
from .advantage import kl_advantages
from .batch import Completion, Rollout, ScoredBatch
from .callbacks import AfterStepCallback
from .config import OnPolicyDistillationConfig, as_dict
from .data import prepare_eval, prepare_train
from .loop import DistillationLoop, Scored
from .loss import Stats, policy_loss, reduce_loss
from .metrics import record_rewards, record_rollout, record_texts, record_update
from .mixing import name_column
from .models import base_name, load_student, load_tokenizer
from .overlap import Written
from .processes import fsdp_plugin, greatest, served
from .prompts import PromptEncoder
from .rewards import RewardFunc, compute_rewards, reward_names, weighted_rewards
from .rng import forked_rng
from .rollout import RolloutEngine, RolloutFunc, Tool, ToolEngine, make_engine, make_tool_template, trajectories
from .rollout.func import Sampled
from .rows import Row
from .steps import TRAIN
from .teacher_prompts import TeacherPromptEncoder
from .teachers import ServerTeacher, Teacher, make_teachers, name_of, score_with_states, teachers_of

AnyDataset = datasets.Dataset | datasets.IterableDataset
Evaluator = Callable[["OnPolicyDistillationTrainer"], dict[str, float]]


class OnPolicyDistillationTrainer(DistillationLoop):
    """Distils a teacher into a student on the student's own completions, by policy gradient.

    To change one step of the algorithm, override one of `generate_rollout`, `score_with_teacher`, `compute_advantages` and
    `compute_policy_loss`.

    Args:
        model: The student: an id or path (of an adapter, too: it is trained on), a model, or a PeftModel.
        teacher_model: The teacher: an id, a path or a model, "base" for the student's own base with its adapter off, which
            takes no memory, "self" for the student, or the URL of a vLLM server (a list: of its replicas). A dict of several:
            each scores the rows of the dataset of its name, or those whose `teacher` column names it. Unset:
            `args.teacher_model_name_or_path`.
        args: Settings.
        train_dataset: Has a `prompt` column, texts or lists of messages; other columns go to the reward functions. Where
            it has a `teacher_prompt`, the teacher sees that in place of the prompt (privileged context). A dict of several
            is mixed as `args.prompts_per_step` says.
        eval_dataset: One such dataset or a dict of them: held-out teacher_kl, completion and reward figures.
        processing_class: The student's tokenizer; by default the one saved with it. If it has no pad token, it gets one.
        callbacks: As for `Trainer`.
        optimizers: As for `Trainer`.
        quantization_config: Loads a student given by name quantised (QLoRA, together with `peft_config`).
        peft_config: Adapter to train in place of the student's weights.
        tools: Functions the student may call, as in TRL; what they return is read by both, and not trained on.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`; mixed into the advantage.
        evaluators: Called with the trainer at each evaluation; the figures they return are logged as `eval_<name>`.
        rollout_func: Your own loop in place of sampling: `f(prompts, trainer) -> dict`, see docs/rollouts.md.

    Raises:
        ValueError: If something does not fit together; the message says what was found and what to do.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        teacher_model: checks.TeacherModel | dict[str, checks.TeacherModel] | None = None,
        args: OnPolicyDistillationConfig | None = None,
        train_dataset: AnyDataset | dict[str, datasets.Dataset] | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: QuantizationConfigMixin | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Tool] | None = None,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        evaluators: list[Evaluator] | None = None,
        rollout_func: RolloutFunc | None = None,
    ) -> None:
        args = args or OnPolicyDistillationConfig()
        teacher_model = checks.teacher_given(teacher_model, args)
        checks.check_sampling(args, own_loop=rollout_func is not None)
        checks.check_devices(args.n_gpu)
        self.student_name = model if isinstance(model, str) else base_name(model)
        loaded_here = isinstance(model, str)
        set_seed(args.seed)  # adapters start at random
        model = load_student(model, args, quantization_config, peft_config)
        tokenizer = checks.prepare_tokenizer(processing_class or load_tokenizer(self.student_name, args))
        self.vocab_size = checks.policy_vocab_size(tokenizer)
        checks.check_vocab_rows(model, self.vocab_size, "student")
        self.rollout_func, self.stop_ids = rollout_func, checks.stop_token_ids(model, tokenizer)
        # what another thread uses is a copy: fast tokenizers fail where one thread sets padding and another encodes
        own_tokenizer = copy.deepcopy(tokenizer) if args.rollout_lag else tokenizer
        tool_template = make_tool_template(tools, rollout_func, own_tokenizer, self.stop_ids, args)
        template_kwargs = as_dict(args.chat_template_kwargs) if tool_template is None else tool_template.kwargs
        self.prompt_encoder = PromptEncoder(own_tokenizer, template_kwargs, checks.prompt_limit(model, args))
        self.teacher_prompts = TeacherPromptEncoder(own_tokenizer, args, template_kwargs)
        self.reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or [])
        self.reward_weights = checks.reward_weights(args, len(self.reward_funcs))
        self.evaluators = list(evaluators or [])
        own = self.teacher_prompts, teacher_model if isinstance(teacher_model, dict) else ()
        train_data = None if train_dataset is None else prepare_train(train_dataset, self.prompt_encoder, *own, args)
        self.prepare_eval = lambda dataset: prepare_eval(dataset, *own)
        eval_dataset = self.prepare_eval(eval_dataset)
        if eval_dataset is None and self.evaluators:
            eval_dataset = {}  # nothing to roll out, but Trainer must not refuse to evaluate
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=cast(Any, train_data),
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[AfterStepCallback(self.after_step), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.engine: RolloutEngine = make_engine(args, model, tokenizer, synced_gpus=self.is_fsdp_enabled)
        if tool_template is not None:
            together = self.is_fsdp_enabled and args.rollout_engine == "transformers"
            self.engine = ToolEngine(self.engine, tool_template, args, (lambda n: greatest([n])[0]) if together else None)
        self.teacher: Teacher = make_teachers(
            teacher_model,
            self.student,
            tokenizer,
            args,
            self._prepare_teacher,
            may_share_base=loaded_here,
            most=greatest if fsdp_plugin(self.accelerator) else None,
        )
        self.teacher_name = name_of(teacher_model, self.teacher)
        self._name_column = name_column(train_dataset, teacher_model)

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

        logps_BT, entropy_BT, divergence_BT = self.student_scores(model, batch)
        if self._sampled_now:
            self.compare_engine(logps_BT.detach(), batch)
        if self.args.kl_logps == "current":
            advantages_BT = self.compute_advantages(
                logps_BT.detach(), batch.teacher_logps_BT, batch.mask_BT, batch.reward_advantages_B
            )
            batch = replace(batch, advantages_BT=advantages_BT)
        loss, stats = self.compute_policy_loss(logps_BT, batch, num_items_in_batch)
        if divergence_BT is not None:
            own = batch.mask_BT, self.args.loss_reduction, num_items_in_batch
            loss = loss + self.args.kl_penalty_coef * reduce_loss(divergence_BT, *own)

        record_update(self.metrics, batch, logps_BT, entropy_BT, stats)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, the count is global
        return (loss, {"logps": logps_BT}) if return_outputs else loss

    def scored_batch(self, rows: list[dict[str, Any]], written: Written | None = None) -> ScoredBatch:
        """Everything before the update: rollout (unless it is `written`), teacher, rewards, advantages."""
        if written is None:
            rows = self.with_seeds(rows, self.train_shares, 0, TRAIN, self.state.global_step)
            rollout, teacher_logps_BT, rewards_BF, states = self.rollout_and_scores(rows, TRAIN, self.state.global_step)
        else:
            rollout, teacher_logps_BT, rewards_BF, states = self.scores(*written)
        self._sampled_now = written is None or self.progress.sampled_at == self.state.global_step
        if self.state.global_step == 0:
            self.judge_first_rollout(rollout, teacher_logps_BT)
        reward_advantages_B = self._reward_advantages(rewards_BF).to(rollout.sampled_logps_BT)
        advantages_BT = self.compute_advantages(
            rollout.sampled_logps_BT, teacher_logps_BT, rollout.mask_BT, reward_advantages_B
        )
        checks.check_advantages(advantages_BT)
        batch = ScoredBatch.of(rollout, teacher_logps_BT, reward_advantages_B, advantages_BT, states)
        self.after_rollout(rollout, batch)
        return batch

    def rollout_and_scores(self, rows: list[dict[str, Any]], *stream: int) -> Scored:
        """Completions for `rows` by the weights as they are now, and what `scores` says of them."""
        self.sync_engine()
        with self.metrics.timed("rollout"), forked_rng(self.args.seed, *stream, self.accelerator.process_index), served():
            rollout = self.generate_rollout(rows)
        if self.args.truncates_sampling and not self.engine.whole_softmax:
            rollout = rollout.with_sampled_logps(self.student_logps(rollout))
        checks.check_rollout(rollout, len(rows))
        return self.scores(rollout)

    def scores(self, rollout: Rollout, teacher_logps_BT: Tensor | None = None) -> Scored:
        """The rollout, the teacher's log-probs of it (B, T), unless they are there, and its rewards (B, F); all measured."""
        rollout, real_B, states = rollout.without_fillers(), rollout.real_B, None
        with self.metrics.timed("teacher"), served():
            if self.args.divergence is not None:
                teacher_logps_BT, states = score_with_states(self.teacher, rollout)
            elif teacher_logps_BT is None:
                teacher_logps_BT = self.score_with_teacher(rollout)
        checks.check_scores(rollout, teacher_logps_BT, self.args.kl_clip)
        ids = rollout.completion_ids()
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        rewards_BF = compute_rewards(self.reward_funcs, rollout.rows, texts, ids, rollout.tool_use, trainer_state=self.state)
        rewards_BF[~real_B.cpu()] = torch.nan

        record_rollout(self.metrics, rollout[real_B], teacher_logps_BT[real_B], self._name_column)
        record_texts(self.metrics, [text for text, real in zip(texts, real_B.tolist(), strict=True) if real])
        totals_B = weighted_rewards(rewards_BF, self.reward_weights)
        record_rewards(self.metrics, rewards_BF, totals_B, reward_names(self.reward_funcs))
        return rollout, teacher_logps_BT, rewards_BF, states

    def write_ahead(self, rows: list[dict[str, Any]]) -> Written:
        """A rollout and, where all teachers are servers, their log-probs of it; in another thread while a step trains."""
        rollout = self.generate_rollout(rows)
        checks.check_rollout(rollout, len(rows))
        elsewhere = all(isinstance(teacher, ServerTeacher) for teacher in teachers_of(self.teacher))
        return rollout, self.score_with_teacher(rollout.without_fillers()) if elsewhere else None

    # ---- Its four steps, for subclasses

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        """Lets the student write one completion for each row; rows of a group follow each other."""
        if self.rollout_func is not None:
            with served():  # what follows waits for all processes
                found = self._of_user(rows)
            return self._with_logps(self._rollout_of(*found))
        seeds = [row.seed for row in rows if isinstance(row, Row) and row.seed is not None]
        whole = [self.prompt_encoder.encode(row) for row in rows]
        prompts = [self.prompt_encoder.truncate(prompt) for prompt in whole]
        with self.accelerator.autocast():  # `generate` of an adapted model does not pass the wrapper that training is cast by
            completions = self.engine.generate(self.student(), prompts, seeds if len(seeds) == len(rows) else None)
        cut = [len(prompt) > len(kept) for prompt, kept in zip(whole, prompts, strict=True)]
        return self._rollout_of(prompts, completions, rows, cut)

    def _rollout_of(
        self,
        prompts: list[list[int]],
        completions: list[Completion],
        rows: list[dict[str, Any]],
        prompt_cut: list[bool] | None = None,
    ) -> Rollout:
        return Rollout.build(
            prompts,
            completions,
            rows,
            pad_id=cast(int, self.processing_class.pad_token_id),
            device=self.args.device,
            teacher_prompts=self.teacher_prompts.encode_rows(rows, prompts),
            mask_truncated=self.args.mask_truncated_completions,
            prompt_cut=prompt_cut,
        )

    def _of_user(self, rows: list[dict[str, Any]]) -> Sampled:
        """Prompts and completions of `rollout_func`, and the rows with the columns it added."""
        assert self.rollout_func is not None
        returned = self.rollout_func([row["prompt"] for row in rows], self)
        context = checks.context_length(self.student())
        return trajectories(returned, rows, stop_ids=self.stop_ids, vocab_size=self.vocab_size, context=context)

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
            immediate=self.args.divergence is None,
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
