"""From a command line to a trainer: what `examples/distill.py` and `trl-opd` share."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from .callbacks import StopOnSignals
from .command_line import UsageError, resuming
from .config import OnPolicyDistillationConfig, as_dict
from .trainer import OnPolicyDistillationTrainer

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_data(arguments: ScriptArguments, args: OnPolicyDistillationConfig) -> tuple[Any, Any]:
    """The train split, and the test split if there is evaluation, of a Hub or local dataset, or the rows of a file.

    Raises:
        ValueError: If there is no dataset, or it has no such split.
    """
    if arguments.dataset_name is None:
        raise ValueError("There is no --dataset_name; a dataset with a `prompt` column is needed.")
    name, files = arguments.dataset_name, None
    if Path(name).is_file():
        if (kind := FILES.get(Path(name).suffix)) is None:
            raise ValueError(f"--dataset_name is the file {name}, which is none of {', '.join(FILES)}.")
        name, files = kind, name
    data: Any = datasets.load_dataset(
        name, name=arguments.dataset_config, data_files=files, streaming=arguments.dataset_streaming
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

    Raises:
        ValueError: If there is no student, or it or the teacher cannot be loaded.
    """
    if model.model_name_or_path is None:
        raise ValueError("There is no --model_name_or_path; it names the student, a model or an adapter.")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        **as_dict(args.model_init_kwargs),
    }
    try:
        return OnPolicyDistillationTrainer(
            model=str(model.model_name_or_path),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            **more,
        )
    except OSError as error:  # transformers' messages do not always say what they were about
        raise ValueError(
            f"The student ({model.model_name_or_path}) or the teacher ({args.teacher_model_name_or_path}) cannot be loaded. "
            f"Each must be a folder, or a model on the Hub that can be reached: {error}"
        ) from error


def distill(
    trainer: OnPolicyDistillationTrainer, dataset_name: str | None = None, argv: Sequence[str] | None = None
) -> int | None:
    """Trains and saves the student with its card; with `push_to_hub`, pushes both. All processes must call this.

    After a SIGINT or SIGTERM the step is finished, a checkpoint saved, and the command that goes on from it printed; a second
    SIGINT is a KeyboardInterrupt at once.

    Args:
        trainer: Its settings say where a run to go on with has its checkpoint.
        dataset_name: For the card.
        argv: How the program was called, in place of `sys.argv`.

    Returns:
        The number of the signal that ended training before its last step; None if it is done, and saved.
    """
    trainer.pop_callback(StopOnSignals)
    stop = StopOnSignals(trainer.any_process, (signal.SIGINT, signal.SIGTERM))
    trainer.add_callback(stop)
    checkpoint = trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(checkpoint).lower() == "true" else checkpoint)
    step = trainer.state.global_step
    if stop.stopped and step < trainer.state.max_steps:
        if trainer.is_world_process_zero():
            command = resuming(sys.argv if argv is None else argv, f"{trainer.args.output_dir}/checkpoint-{step}")
            print(
                f"Stopped after step {step} of {trainer.state.max_steps}, which is saved. This goes on from there:\n{command}"
            )
        return stop.received or signal.SIGTERM
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset=dataset_name)  # which saves first
    else:
        trainer.save_model(_internal_call=True)  # whose card comes next: it would lack the data's name
        trainer.create_model_card(dataset=dataset_name)
    return None


def by_path(path: str, flag: str) -> Callable[..., Any]:
    """The function that a dotted path names; modules are looked for in the present folder too.

    Raises:
        UsageError: If there is none.
    """
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{flag} has {path}, which cannot be imported ({error}). Name a function by its dotted path, as in "
            "my_module.my_function for my_function in my_module.py."
        ) from error
    if not callable(found):
        raise UsageError(f"{flag} has {path}, which is no function but {type(found).__name__}.")
    return found
