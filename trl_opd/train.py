"""`trl-opd train`: what each process of a run does. `accelerate launch -m trl_opd.train` takes the same arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .arguments import LaunchArguments, Parser, TrainArguments
from .command_line import PROGRAM
from .launcher import WORKER
from .program import run
from .scripts import by_path, distill, load_data, make_trainer

DESCRIPTION = (
    "Distils a teacher into a student on the student's own completions: the teacher scores every token the student wrote. "
    "Saves the student (or its adapter) with a model card in --output_dir. Ctrl-C finishes the step, saves a checkpoint and "
    "says how to go on; a second one ends at once."
)


def main(argv: Sequence[str]) -> int:
    """Trains, saves, pushes if asked to; returns 0, or 128 + the number of the signal that ended training."""
    parser = Parser((LaunchArguments, TrainArguments), "trl-opd train", DESCRIPTION)
    _, own, data, args, model = parser.parse(argv)
    train_dataset, eval_dataset = load_data(data, args)
    trainer = make_trainer(
        args,
        model,
        train_dataset,
        eval_dataset,
        reward_funcs=_functions(own.reward_funcs, "--reward_funcs"),
        tools=_functions(own.tools, "--tools"),
    )
    received = distill(trainer, data.dataset_name, argv=[PROGRAM, "train", *argv])
    if received is None and trainer.is_world_process_zero():
        print(f"The {'adapter' if model.use_peft else 'student'} is saved in {args.output_dir}, with a model card.")
    trainer.accelerator.end_training()  # several processes part in order
    # the launcher knows of the signal that it passed on; to fail now would make it end others that still save
    return 0 if received is None or WORKER in os.environ else 128 + received


def _functions(paths: list[str] | None, flag: str) -> list[Callable[..., Any]] | None:
    return [by_path(path, flag) for path in paths] if paths else None


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:], "train"))
