"""A small distillation that `tests/test_launch.py` starts with `accelerate launch`, as a user's script would be."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.helpers import lora, losses, make_dataset, make_trainer

ERROR = "this reward function fails on process 1"


class Progress(TrainerCallback):
    """Appends each finished step to a file, and makes steps last long enough for a signal to arrive between two.

    Args:
        path: The file.
        seconds: What is added to each step.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes, then waits."""
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(f"{state.global_step}\n")
        time.sleep(self.seconds)


def fails_on_process_1(completions: list[str], **columns: Any) -> list[float]:
    """Reward function that raises on one process only."""
    if PartialState().process_index == 1:
        raise RuntimeError(ERROR)
    return [0.0] * len(completions)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--teacher", required=True, help="a folder")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="train all weights, not an adapter")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--reward_fails", action="store_true")
    parser.add_argument("--stoppable", action="store_true", help="save and stop on SIGTERM")
    parser.add_argument("--seconds_per_step", type=float, default=0.0)
    parser.add_argument("--resume_from_checkpoint", default=None)
    return parser.parse_args()


def keep_memory_pageable() -> None:
    """Memory can be pinned for a GPU only, and accelerate always asks FSDP's CPU offload to pin it."""
    CPUOffloadPolicy.__init__.__defaults__ = (False,)  # of pin_memory


def main() -> None:
    """Trains, saves the student, and prints what the tests look at as one line of JSON."""
    given = parse()
    if not torch.cuda.is_available():
        keep_memory_pageable()
    trainer = make_trainer(
        given.output_dir,
        model=given.model,
        teacher_model=given.teacher,
        train_dataset=make_dataset(64),
        peft_config=None if given.full else lora(),
        reward_funcs=fails_on_process_1 if given.reward_fails else None,
        callbacks=[Progress(given.output_dir.with_suffix(".steps"), given.seconds_per_step)],
        per_device_train_batch_size=given.per_device_train_batch_size,
        num_generations=2 if given.reward_fails else 1,
        max_steps=given.max_steps,
        lr_scheduler_type="linear",
        activation_checkpointing=True,
        bf16=given.bf16,
        enable_jit_checkpoint=given.stoppable,
        use_cpu="ACCELERATE_USE_FSDP" not in os.environ,  # without it DDP looks for GPUs; with it there would be no FSDP
    )
    trainer.train(resume_from_checkpoint=given.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        accelerator, parameters = trainer.accelerator, trainer.model.parameters()
        meshes = {tuple(each.device_mesh.shape) if isinstance(each, DTensor) else () for each in parameters}
        result = {
            "losses": losses(trainer),
            "step": trainer.state.global_step,
            "processes": accelerator.num_processes,
            "distributed_type": accelerator.distributed_type.value,
            "mixed_precision": accelerator.mixed_precision,
            "meshes": sorted(meshes),
        }
        print(f"RESULT {json.dumps(result)}", flush=True)
    trainer.accelerator.end_training()  # a process that ends with its group open sometimes aborts, and so fails the launch
    sys.stdout.flush()
    os._exit(
        0
    )  # seldom it aborts all the same, where torch takes its threads down ("terminate called without an active exception")


if __name__ == "__main__":
    main()
