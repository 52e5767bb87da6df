"""From a command line to a trainer: what `examples/distill.py` and `trl-opd` share."""

from __future__ import annotations

from typing import Any

import datasets
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from .config import OnPolicyDistillationConfig, as_dict
from .trainer import OnPolicyDistillationTrainer


def load_data(arguments: ScriptArguments, args: OnPolicyDistillationConfig) -> tuple[Any, Any]:
    """The train split, and the test split if there is evaluation, of a Hub or local dataset.

    Raises:
        ValueError: If there is no dataset, or it has no such split.
    """
    if arguments.dataset_name is None:
        raise ValueError("There is no --dataset_name; a dataset with a `prompt` column is needed.")
    data: Any = datasets.load_dataset(
        arguments.dataset_name, name=arguments.dataset_config, streaming=arguments.dataset_streaming
    )
    wanted = [arguments.dataset_train_split, *([arguments.dataset_test_split] if args.eval_strategy != "no" else [])]
    if missing := [split for split in wanted if split not in data]:
        raise ValueError(
            f"There is no split {missing[0]!r}, only {list(data)}. Set --dataset_train_split or --dataset_test_split."
        )
    return data[wanted[0]], data[wanted[1]] if len(wanted) == 2 else None


def make_trainer(
    args: OnPolicyDistillationConfig, model: ModelConfig, train_dataset: Any, eval_dataset: Any = None, **more: Any
) -> OnPolicyDistillationTrainer:
    """The trainer of parsed arguments: TRL's `ModelConfig` says how the student is loaded, and its adapter.

    Args:
        args: Settings; the teacher is among them.
        model: The student.
        train_dataset: Has a `prompt` column.
        eval_dataset: Likewise, or None.
        more: Other arguments of the trainer.
    """
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        **as_dict(args.model_init_kwargs),
    }
    return OnPolicyDistillationTrainer(
        model=str(model.model_name_or_path),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        **more,
    )
