"""What settings alone tell to be wrong, before any model or dataset is there. `args` is an `OnPolicyDistillationConfig`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .loss import loss_settings


def parse_json(args: Any, names: Sequence[str]) -> None:
    """Turns dictionary settings that came as JSON from the command line into dictionaries."""
    for name in names:
        if isinstance(value := getattr(args, name), str):
            try:
                setattr(args, name, dict(json.loads(value)))
            except (ValueError, TypeError) as error:
                example = '{"key": 1}'
                raise ValueError(f"{name} is '{value}', which is not a JSON object such as '{example}': {error}.") from error


def check_values(args: Any) -> None:
    """Raises ValueError for a value that a setting cannot have."""
    if not args.temperature > 0:
        raise ValueError(
            f"temperature is {args.temperature}, but the policy gradient needs sampled completions: greedy decoding has "
            "no distribution to train. Use a temperature > 0 (1.0 is the default)."
        )
    if not 0 <= args.kl_discount_factor <= 1:
        raise ValueError(f"kl_discount_factor is {args.kl_discount_factor}; it must lie between 0 and 1.")
    if args.kl_clip is not None and args.kl_clip <= 0:
        raise ValueError(f"kl_clip is {args.kl_clip} nats; a bound must be > 0. Leave it out for no bound.")
    if not args.vllm_server_timeout > 0:
        raise ValueError(f"vllm_server_timeout is {args.vllm_server_timeout} s; it must be > 0 (240 is the default).")
    counts = ("kl_top_k", "num_generations", "max_completion_length", "num_substeps", "teacher_sync_steps")
    optional = ("max_prompt_length", "per_device_rollout_batch_size", "max_tool_calling_iterations")
    for name in (*counts, *optional, "max_tokens_per_micro_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    choosing = ("long_prompts", "kl_logps", "kl_granularity", "kl_direction", "loss_reduction", "scale_rewards")
    for name in (*choosing, "stopping_strategy", "rollout_engine"):
        choices = args.__dataclass_fields__[name].metadata["choices"]
        if getattr(args, name) not in choices:
            raise ValueError(f"{name} is '{getattr(args, name)}'; it must be one of {', '.join(choices)}.")
    if (args.rollout_engine == "vllm") != bool(args.vllm_server_base_url):
        raise ValueError(
            f"rollout_engine is '{args.rollout_engine}' and vllm_server_base_url is {args.vllm_server_base_url}: servers "
            "are for rollout_engine='vllm', which needs at least one. Set both or neither."
        )
    steps = args.trace_steps
    if steps is not None and not (isinstance(steps, list) and all(isinstance(step, int) and step >= 1 for step in steps)):
        raise ValueError(f"trace_steps is {steps!r}; it must be a list of optimizer steps, which count from 1, as [2, 3].")
    check_lag(args)
    loss_settings(args.loss_fn, args.loss_fn_config)
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy is '{args.train_sampling_strategy}', which orders rows by a length they do not have "
            "before the rollout. Use 'random' or 'sequential'."
        )


def check_objective(args: Any) -> None:
    """Raises ValueError for settings of the KL that do not go together."""
    dense, direction = args.kl_granularity != "sampled", args.kl_direction
    if direction != "reverse" and not dense:
        raise ValueError(
            f"kl_direction is '{direction}', but with kl_granularity 'sampled' the advantage is the reverse KL's: the tokens "
            "are the student's. Set kl_granularity to 'full' or 'topk', or leave kl_direction out."
        )
    if args.beta is not None and direction != "jsd":
        raise ValueError(
            f"beta is {args.beta}, but kl_direction '{direction}' has none. Set kl_direction='jsd', or leave beta out. (That "
            "of loss_fn 'dro' stands in loss_fn_config.)"
        )
    if args.beta is not None and not 0 < args.beta < 1:
        raise ValueError(
            f"beta is {args.beta}; it is the teacher's share of the mixture and must lie between 0 and 1, not at them: "
            "there the divergence is 0 for all. For TRL's 0 set kl_direction='forward', for its 1 'reverse'."
        )
    if dense and args.kl_discount_factor and direction != "reverse":
        raise ValueError(
            f"kl_discount_factor is {args.kl_discount_factor}, which adds the sampled reverse KL of later tokens, but "
            f"kl_direction is '{direction}'. Use kl_discount_factor=0, or kl_direction='reverse'."
        )
    ignored = {"kl_clip": args.kl_clip is not None, "kl_logps": args.kl_logps != "sampled"}
    for name in [name for name, is_set in ignored.items() if is_set and dense and not args.kl_discount_factor]:
        raise ValueError(
            f"{name} is {getattr(args, name)!r}, but it is about the KL of sampled tokens, and kl_granularity "
            f"'{args.kl_granularity}' has none with kl_discount_factor 0. Leave it out."
        )


def check_lag(args: Any) -> None:
    """Raises ValueError if no rollout can be written while the step before it trains."""
    if args.rollout_lag not in (0, 1):
        raise ValueError(
            f"rollout_lag is {args.rollout_lag}; it must be 0 (strictly on-policy) or 1 (the next rollout is written while a "
            "step trains). With older weights the importance ratio would correct for less and less."
        )
    if args.rollout_lag and args.rollout_engine != "vllm":
        raise ValueError(
            f"rollout_lag is 1, but rollout_engine '{args.rollout_engine}' samples in the training process, which cannot "
            "train meanwhile. Use rollout_engine='vllm', or rollout_lag=0."
        )
    if args.rollout_lag and args.truncates_sampling:
        raise ValueError(
            "rollout_lag is 1, and top_p, top_k, min_p or repetition_penalty truncate what is sampled: the log-probs under "
            "the whole softmax would have to come from weights that are gone by then. Leave these out, or use rollout_lag=0."
        )


def check_teacher_settings(args: Any) -> None:
    """Raises ValueError for settings of teachers and datasets that make no sense."""
    if args.teacher_ema is not None and not 0 < args.teacher_ema < 1:
        raise ValueError(
            f"teacher_ema is {args.teacher_ema}; it is what the teacher keeps of itself in an update and must lie between 0 "
            "and 1, as 0.99. For a plain copy leave it out and set teacher_sync_steps."
        )
    template = args.teacher_chat_template
    if template is not None and "{" not in template and not Path(template).is_file():
        raise ValueError(
            f"teacher_chat_template is {template!r}, which is neither Jinja text nor a file. Pass the template itself, or the "
            "path of a file that holds it."
        )
    for name, number in (args.prompts_per_step or {}).items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"prompts_per_step['{name}'] is {number!r}; it must be a whole number, at least 1.")


def check_unsupported(args: Any) -> None:
    """Raises ValueError for settings of `TrainingArguments` that would be ignored, or would make the figures wrong."""
    reasons = {
        "neftune_noise_alpha": "noise in training only makes the current policy another than the one that sampled",
        "label_smoothing_factor": "there are no labels to smooth",
        "auto_find_batch_size": "a smaller batch would cut groups and drop the rollout in hand",
        "bf16_full_eval": "evaluation samples from the weights as they are trained",
        "fp16_full_eval": "evaluation samples from the weights as they are trained",
    }
    for name, reason in reasons.items():
        if getattr(args, name):
            raise ValueError(f"{name} is {getattr(args, name)}, but {reason}. Leave it out.")


def check_dispatch(accelerator_config: Any) -> None:
    """Raises ValueError if accelerate is to deal rows to the processes."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(accelerator_config, name):
            raise ValueError(
                f"accelerator_config has {name}=True, but rows are dealt to the processes in whole groups, and are Python "
                "objects, which accelerate does not slice. Leave it out."
            )


def check_batch(args: Any) -> None:
    """Raises ValueError if an optimizer step is not whole groups of completions."""
    if args.dataloader_drop_last and args.per_device_train_batch_size % args.num_generations:
        raise ValueError(
            f"dataloader_drop_last would drop part of a group: num_generations {args.num_generations} does not divide "
            f"per_device_train_batch_size {args.per_device_train_batch_size}. Change one of the three."
        )
    if args.step_batch_size % args.num_generations:
        raise ValueError(
            f"An optimizer step has {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} = "
            f"{args.step_batch_size} completions on each device (per_device_train_batch_size x "
            "gradient_accumulation_steps), which cannot be divided into groups of num_generations = "
            f"{args.num_generations}. Change one of the three."
        )
