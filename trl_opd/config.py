"""Settings of `OnPolicyDistillationTrainer`: every field is also a command-line flag through `trl.TrlParser`."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from .loss import REDUCTIONS, loss_settings

OBJECTIVE = [
    "loss_fn",
    "loss_fn_config",
    "loss_reduction",
    "kl_penalty_coef",
    "kl_discount_factor",
    "kl_clip",
    "kl_logps",
    "num_substeps",
    "num_generations",
    "max_completion_length",
    "temperature",
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "seed",
]
DICTS = ("model_init_kwargs", "teacher_model_init_kwargs", "chat_template_kwargs", "loss_fn_config")


def as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dictionary setting, which `OnPolicyDistillationConfig` has parsed if it came as JSON."""
    assert not isinstance(value, str)
    return value or {}


def _help(text: str, **more: Any) -> dict[str, Any]:
    return {"help": text, **more}


@dataclass
class OnPolicyDistillationConfig(TrainingArguments):
    """`transformers.TrainingArguments` plus what on-policy distillation adds; names are those of TRL and Tinker.

    `per_device_train_batch_size` counts completions, as in TRL's GRPO: an optimizer step trains on
    `per_device_train_batch_size * gradient_accumulation_steps` completions per process, of which each `num_generations`
    share a prompt.

    Defaults that differ from `TrainingArguments`, because public OPD runs worked with them: `learning_rate` 1e-4 (LoRA; take
    5e-5 or less for full weights), `lr_scheduler_type` constant, `adam_beta2` 0.95, `logging_steps` 1, `bf16` on if the GPU
    has it, `activation_checkpointing` on, `eval_on_start` on if there is an evaluation strategy, `remove_unused_columns` off
    (rewards need the columns).
    """

    # Defaults of TrainingArguments that are set anew
    learning_rate: float = field(default=1e-4, metadata=_help("Initial learning rate. 1e-4 suits LoRA, 5e-5 full weights."))
    lr_scheduler_type: str = field(default="constant", metadata=_help("Learning rate schedule."))
    adam_beta2: float = field(default=0.95, metadata=_help("AdamW's beta2."))
    logging_steps: float = field(default=1, metadata=_help("Log every so many optimizer steps."))
    bf16: bool | None = field(default=None, metadata=_help("bf16 mixed precision; unset: on where the GPU has it."))
    activation_checkpointing: bool | None = field(
        default=True,
        metadata=_help("Recompute activations in the backward pass: less memory for about a fifth more time."),
    )
    eval_on_start: bool = field(default=True, metadata=_help("Evaluate before the first step, if evaluation is on."))
    remove_unused_columns: bool = field(default=False, metadata=_help("Keep False: rewards get every column."))

    # Models
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=_help("Keyword arguments of `from_pretrained` for a student given by name. dtype: float32."),
    )
    trust_remote_code: bool = field(default=False, metadata=_help("Allow models and tokenizers that ship Python code."))
    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata=_help("Teacher: a model id, a path (a model's or an adapter's), or 'base': the student without its adapter."),
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=_help("Keyword arguments of `from_pretrained` for the teacher. dtype: the checkpoint's own."),
    )

    # Prompts
    max_prompt_length: int | None = field(
        default=None,
        metadata=_help("Longest prompt in tokens; unset: the context length minus max_completion_length."),
    )
    long_prompts: str = field(
        default="truncate",
        metadata=_help(
            "What to do with longer prompts: 'truncate' from the left (counted in prompts/truncated_fraction) or 'drop'.",
            choices=["truncate", "drop"],
        ),
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=_help("Extra arguments of the chat template, e.g. '{\"enable_thinking\": false}'.")
    )

    # Rollouts
    num_generations: int = field(default=1, metadata=_help("Completions per prompt. Rewards need at least 2."))
    max_completion_length: int = field(
        default=512, metadata=_help("Longest completion in tokens, the stop token and the output of tools included.")
    )
    temperature: float = field(
        default=1.0, metadata=_help("Sampling temperature; student and teacher are scored at the same one. > 0.")
    )
    top_p: float = field(
        default=1.0,
        metadata=_help("Nucleus sampling. Below 1.0 tokens are drawn from a truncated distribution, and scored by the whole."),
    )
    top_k: int = field(default=0, metadata=_help("Top-k sampling, 0 for none. As with top_p."))
    min_p: float | None = field(default=None, metadata=_help("Least probability relative to the likeliest token."))
    repetition_penalty: float = field(default=1.0, metadata=_help("Repetition penalty, 1.0 for none. As with top_p."))
    per_device_rollout_batch_size: int | None = field(
        default=None,
        metadata=_help(
            "Completions sampled at once on each device; unset: all of one optimizer step. Lower it to save memory."
        ),
    )
    gather_for_generation: bool = field(
        default=True,
        metadata=_help(
            "Under FSDP, hold the whole student on each device while it samples. False, for a student too large for that, "
            "gathers every layer for every token."
        ),
    )
    mask_truncated_completions: bool = field(
        default=False, metadata=_help("Do not train on completions that were cut at max_completion_length.")
    )

    max_tool_calling_iterations: int | None = field(
        default=None,
        metadata=_help(
            "Most times that a completion gets answers of `tools`; unset: as often as max_completion_length has room for."
        ),
    )

    # Objective
    kl_penalty_coef: float = field(default=1.0, metadata=_help("Weight of the negative reverse KL in the advantage."))
    kl_discount_factor: float = field(
        default=0.0,
        metadata=_help("How much a token answers for the KL of the later ones, 0 (only its own) to 1 (all)."),
    )
    kl_clip: float | None = field(default=None, metadata=_help("Bound on each token's |log-ratio to the teacher|, in nats."))
    kl_logps: str = field(
        default="sampled",
        metadata=_help(
            "Student log-probs in the KL: 'sampled' (those of the rollout) or 'current' (recomputed at each update).",
            choices=["sampled", "current"],
        ),
    )
    loss_fn: str = field(
        default="importance_sampling", metadata=_help("importance_sampling, ppo, cispo or dro; see `policy_loss`.")
    )
    loss_fn_config: dict[str, Any] | str | None = field(
        default=None, metadata=_help("Settings of loss_fn, e.g. '{\"clip_high_threshold\": 1.3}' for ppo.")
    )
    loss_reduction: str = field(
        default="token_mean",
        metadata=_help(
            "Mean over the action tokens of the optimizer step, over its sequences, or the sum.",
            choices=list(REDUCTIONS),
        ),
    )
    num_substeps: int = field(default=1, metadata=_help("Optimizer steps per rollout; each takes a different part of it."))
    compute_post_kl: bool = field(
        default=False,
        metadata=_help("Log update_kl: how far a rollout's updates moved the policy. Costs a forward pass."),
    )

    # Rewards
    reward_weights: list[float] | None = field(default=None, metadata=_help("Weight of each reward function; unset: 1."))
    scale_rewards: str = field(
        default="none",
        metadata=_help(
            "Divide centred rewards by their standard deviation: of the group, of the batch, or not at all.",
            choices=["none", "group", "batch"],
        ),
    )

    # Logging
    log_completions: bool = field(
        default=False,
        metadata=_help("At each log, print a completion (of each dataset) coloured by advantage and write all to parquet."),
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        if self.eval_strategy in ("no", None):
            self.eval_on_start = False
        if self.greater_is_better is None and "_kl" in (self.metric_for_best_model or ""):
            self.greater_is_better = False  # TrainingArguments takes all for scores whose name does not end in "loss"
        self._parse_dicts()
        super().__post_init__()
        accelerator_config = cast(AcceleratorConfig, self.accelerator_config)
        if accelerator_config.dispatch_batches is None:
            accelerator_config.dispatch_batches = False  # rows are Python objects, which are not sliced like tensors
        for name in ("dispatch_batches", "split_batches"):
            if getattr(accelerator_config, name):
                raise ValueError(
                    f"accelerator_config has {name}=True, but rows are dealt to the processes in whole groups, and are Python "
                    "objects, which accelerate does not slice. Leave it out."
                )
        self._check_values()
        self._check_unsupported()
        self._check_batch()

    @property
    def truncates_sampling(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax that is trained."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1

    @property
    def step_batch_size(self) -> int:
        """Completions of one optimizer step on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def objective(self) -> dict[str, object]:
        """What was optimised, for the model card."""
        return {name: getattr(self, name) for name in OBJECTIVE if getattr(self, name) is not None}

    def _parse_dicts(self) -> None:
        """Turns our dictionary settings that came as JSON from the command line into dictionaries."""
        for name in DICTS:
            if isinstance(value := getattr(self, name), str):
                try:
                    setattr(self, name, dict(json.loads(value)))
                except (ValueError, TypeError) as error:
                    example = '{"key": 1}'
                    raise ValueError(
                        f"{name} is '{value}', which is not a JSON object such as '{example}': {error}."
                    ) from error

    def _check_values(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, but the policy gradient needs sampled completions: greedy decoding has "
                "no distribution to train. Use a temperature > 0 (1.0 is the default)."
            )
        if not 0 <= self.kl_discount_factor <= 1:
            raise ValueError(f"kl_discount_factor is {self.kl_discount_factor}; it must lie between 0 and 1.")
        if self.kl_clip is not None and self.kl_clip <= 0:
            raise ValueError(f"kl_clip is {self.kl_clip} nats; a bound must be > 0. Leave it out for no bound.")
        counts = ("num_generations", "max_completion_length", "num_substeps")
        optional = ("max_prompt_length", "per_device_rollout_batch_size", "max_tool_calling_iterations")
        for name in (*counts, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        for name in ("long_prompts", "kl_logps", "loss_reduction", "scale_rewards"):
            choices = self.__dataclass_fields__[name].metadata["choices"]
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is '{getattr(self, name)}'; it must be one of {', '.join(choices)}.")
        loss_settings(self.loss_fn, cast(dict[str, Any] | None, self.loss_fn_config))
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy is '{self.train_sampling_strategy}', which orders rows by a length they do not have "
                "before the rollout. Use 'random' or 'sequential'."
            )

    def _check_unsupported(self) -> None:
        """Refuses settings of `TrainingArguments` that would be ignored, or would make the figures wrong."""
        reasons = {
            "neftune_noise_alpha": "noise in training only makes the current policy another than the one that sampled",
            "label_smoothing_factor": "there are no labels to smooth",
            "auto_find_batch_size": "a smaller batch would cut groups and drop the rollout in hand",
            "bf16_full_eval": "evaluation samples from the weights as they are trained",
            "fp16_full_eval": "evaluation samples from the weights as they are trained",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, but {reason}. Leave it out.")

    def _check_batch(self) -> None:
        if self.dataloader_drop_last and self.per_device_train_batch_size % self.num_generations:
            raise ValueError(
                f"dataloader_drop_last would drop part of a group: num_generations {self.num_generations} does not divide "
                f"per_device_train_batch_size {self.per_device_train_batch_size}. Change one of the three."
            )
        if self.step_batch_size % self.num_generations:
            raise ValueError(
                f"An optimizer step has {self.per_device_train_batch_size} x {self.gradient_accumulation_steps} = "
                f"{self.step_batch_size} completions on each device (per_device_train_batch_size x "
                "gradient_accumulation_steps), which cannot be divided into groups of num_generations = "
                f"{self.num_generations}. Change one of the three."
            )
