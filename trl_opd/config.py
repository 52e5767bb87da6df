"""Settings of `OnPolicyDistillationTrainer`: every field is also a command-line flag through `trl.TrlParser`."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from . import config_checks
from .divergence import DIRECTIONS, GRANULARITIES, Divergence
from .loss import REDUCTIONS

ENGINES = ("transformers", "vllm")
DICTS = ("model_init_kwargs", "teacher_model_init_kwargs", "chat_template_kwargs", "loss_fn_config", "prompts_per_step")


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
    teacher_model_name_or_path: dict[str, str] | str | None = field(
        default=None,
        metadata=_help(
            "Teacher: a model id, a path (a model's or an adapter's), 'base' (the student without its adapter), 'self' (the "
            "student), or the URL of a vLLM server, 'http://host:8000' or 'http://host:8000#served-name'. Several: a "
            'dictionary, one for each dataset or value of the `teacher` column, e.g. \'{"math": "Qwen/Qwen3-4B", "code": '
            '"base"}\'.'
        ),
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=_help(
            "Keyword arguments of `from_pretrained` for the teacher. dtype: the checkpoint's own. Of several teachers: for "
            "all that are loaded, or a dictionary for each under its name."
        ),
    )
    teacher_offload: bool = field(
        default=False,
        metadata=_help("Keep teachers with weights of their own in CPU memory while they do not score. Not under FSDP."),
    )
    teacher_ema: float | None = field(
        default=None,
        metadata=_help(
            "Teacher 'self': it is the moving average of the student's adapter, of which each update keeps so much, e.g. 0.99."
        ),
    )
    teacher_sync_steps: int | None = field(
        default=None,
        metadata=_help(
            "Teacher 'self': it follows the student every so many optimizer steps: as a copy of its adapter, or as "
            "teacher_ema says. Neither set: the teacher is the student as it is."
        ),
    )
    vllm_server_timeout: float = field(
        default=240.0,
        metadata=_help("Seconds for which a request to a vLLM server is tried again, and a server waited for at the start."),
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

    teacher_chat_template: str | None = field(
        default=None, metadata=_help("The chat template teachers see conversational prompts in: Jinja text, or a file of it.")
    )
    teacher_system_prompt: str | None = field(
        default=None,
        metadata=_help("System message teachers see before a conversational prompt, or in place of its own system message."),
    )
    prompts_per_step: dict[str, int] | str | None = field(
        default=None,
        metadata=_help(
            "With a dictionary of datasets: how many prompts of each a rollout has over all processes, e.g. "
            '\'{"math": 48, "code": 16}\'. Unset: in proportion to their sizes.'
        ),
    )
    stopping_strategy: str = field(
        default="first_exhausted",
        metadata=_help(
            "With a dictionary of datasets: an epoch ends with the first that runs out, or with the last (all_exhausted), "
            "while the others begin again.",
            choices=["first_exhausted", "all_exhausted"],
        ),
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
    rollout_engine: str = field(
        default="transformers",
        metadata=_help(
            "What samples: 'transformers' (the training process) or 'vllm' (servers, which get the LoRA adapter each time).",
            choices=list(ENGINES),
        ),
    )
    vllm_server_base_url: list[str] | None = field(
        default=None,
        metadata=_help("Of rollout_engine 'vllm': http://host:port of the server; several: replicas, which share the work."),
    )
    vllm_adapter_dir: str | None = field(
        default=None,
        metadata=_help("Where servers read the adapter from, under the same path as here; unset: in output_dir."),
    )
    rollout_lag: int = field(
        default=0,
        metadata=_help(
            "1: servers write the next rollout while a step trains, from weights one rollout older; the importance ratio "
            "corrects for that. 0: strictly on-policy. Of rollout_engine 'vllm'."
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
    kl_granularity: str = field(
        default="sampled",
        metadata=_help(
            "The KL of a token: 'sampled' (by its id alone: an advantage), or, of less variance, a loss over all next tokens: "
            "'full', or 'topk' (the student's kl_top_k likeliest and a bucket for the rest). For teachers in the process.",
            choices=list(GRANULARITIES),
        ),
    )
    kl_top_k: int = field(default=Divergence.top_k, metadata=_help("Ids of kl_granularity 'topk' beside the rest."))
    kl_direction: str = field(
        default="reverse",
        metadata=_help(
            "Divergence of kl_granularity 'topk' and 'full': 'reverse' KL(student, teacher), 'forward' or 'jsd' (see beta).",
            choices=list(DIRECTIONS),
        ),
    )
    beta: float | None = field(
        default=None,
        metadata=_help("Of kl_direction 'jsd', 0.5 if unset: near 0 it is like 'forward', near 1 like 'reverse', as in TRL."),
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

    # Speed
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata=_help(
            "Most tokens, padding included, of a forward and backward pass: a micro-batch of more is trained on in parts. "
            "Unset: per_device_train_batch_size times its longest sequence."
        ),
    )

    # Logging
    log_completions: bool = field(
        default=False,
        metadata=_help("At each log, print a completion (of each dataset) coloured by advantage and write all to parquet."),
    )
    report: bool = field(
        default=True, metadata=_help("Write report.html into output_dir: curves, and samples token by token.")
    )

    trace_steps: list[int] | None = field(
        default=None,
        metadata=_help(
            "Optimizer steps, counted from 1, of which to write what ran when to output_dir/traces, for ui.perfetto.dev, e.g. "
            "[2, 3]."
        ),
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        if self.eval_strategy in ("no", None):
            self.eval_on_start = False
        if self.greater_is_better is None and "_kl" in (self.metric_for_best_model or ""):
            self.greater_is_better = False  # TrainingArguments takes all for scores whose name does not end in "loss"
        if isinstance(self.vllm_server_base_url, str):
            self.vllm_server_base_url = [self.vllm_server_base_url]
        several = isinstance(teacher := self.teacher_model_name_or_path, str) and teacher.startswith("{")
        config_checks.parse_json(self, [*DICTS, *(["teacher_model_name_or_path"] if several else [])])
        super().__post_init__()
        accelerator_config = cast(AcceleratorConfig, self.accelerator_config)
        if accelerator_config.dispatch_batches is None:
            accelerator_config.dispatch_batches = False  # rows are Python objects, which are not sliced like tensors
        config_checks.check_dispatch(accelerator_config)
        if self.kl_direction == "jsd" and self.beta is None:
            self.beta = Divergence.beta
        config_checks.check_values(self)
        config_checks.check_objective(self)
        config_checks.check_teacher_settings(self)
        config_checks.check_unsupported(self)
        config_checks.check_batch(self)

    @property
    def truncates_sampling(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax that is trained."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1

    @property
    def step_batch_size(self) -> int:
        """Completions of one optimizer step on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def divergence(self) -> Divergence | None:
        """The loss of kl_granularity 'topk' and 'full'; None for 'sampled'."""
        if self.kl_granularity == "sampled":
            return None
        return Divergence(self.kl_granularity, self.kl_direction, self.beta or Divergence.beta, self.kl_top_k)
