"""The arms of `learning.py`: trainers that start from one student, with one adapter, optimizer, schedule and batch.

Every arm is watched by the same code: which prompts its rows have and how its completions end (compared with the task's own),
how many tokens it trains on, and its student's accuracy every now and then.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from learning_figures import Curve, Point
from learning_tasks import Task, exact_match
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, set_seed
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer
from trl_opd.rng import forked_rng

GROUP = 8
"""Completions of a prompt in GRPO; the other arms take as many prompts as completions."""
OURS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "sampled, discount 1": {"kl_discount_factor": 1.0},
    "topk": {"kl_granularity": "topk", "kl_top_k": 4},
    "full": {"kl_granularity": "full"},
}
ARMS = ("sft", "trl", "grpo", *OURS)
Rows = list[tuple[list[int], list[int]]]
"""Ids of prompt and completion."""


class Watched:
    """What is added to each trainer: its rows are checked and counted."""

    watch: Watch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's."""
        self.watch.see(self.rows_of(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def rows_of(self, inputs: Any) -> Rows:
        """Of a batch: those of TRL's trainers that sample."""
        prompts = masked(inputs["prompt_ids"], inputs["prompt_mask"])
        return list(zip(prompts, masked(inputs["completion_ids"], inputs["completion_mask"]), strict=True))


class Ours(Watched, OnPolicyDistillationTrainer):
    """`trl_opd`."""

    def rows_of(self, inputs: Any) -> Rows:
        """Of a `ScoredBatch`."""
        prompts = masked(inputs.ids_BT, inputs.attention_mask_BT & ~inputs.mask_BT)
        return list(zip(prompts, masked(inputs.ids_BT, inputs.mask_BT), strict=True))


class Distillation(Watched, DistillationTrainer):
    """TRL's."""


class Grpo(Watched, GRPOTrainer):
    """TRL's."""


class Sft(Watched, SFTTrainer):
    """TRL's."""

    def rows_of(self, inputs: Any) -> Rows:
        """Labels are set on completions only."""
        trained_BT = inputs["labels"] != -100
        prompts = masked(inputs["input_ids"], inputs["attention_mask"].bool() & ~trained_BT)
        return list(zip(prompts, masked(inputs["input_ids"], trained_BT), strict=True))


def masked(ids_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """The ids where the mask is set, row by row."""
    return [ids[mask].tolist() for ids, mask in zip(ids_BT, mask_BT.bool(), strict=True)]


class Watch(TrainerCallback):
    """Counts what an arm trains on, and evaluates its student.

    Args:
        task: What it is trained on.
        evaluate_at: Optimizer steps after which the student is evaluated; 0 is before the first.
    """

    def __init__(self, task: Task, evaluate_at: Sequence[int]) -> None:
        self.task, self.evaluate_at = task, set(evaluate_at)
        tokenizer = task.tokenizer()
        self.stop = tokenizer.eos_token_id
        self.prompts = {tuple(ids) for ids in tokenizer(task.prompts()["prompt"][:])["input_ids"]}
        self.curve: Curve = []
        self.rows = self.rollout_tokens = self.context_tokens = 0

    def see(self, rows: Rows) -> None:
        """Rows of an optimizer step, or some of them.

        Raises:
            SystemExit: If they are not what every arm is to train on.
        """
        self.rows += len(rows)
        for prompt, completion in rows:
            if tuple(prompt) not in self.prompts:
                raise SystemExit(f"{prompt} is no prompt of {self.task.name}")
            full = len(completion) == self.task.max_completion_length
            if self.stop in completion[:-1] or not (full or completion[-1] == self.stop):
                raise SystemExit(f"{completion} neither ends with its only stop token nor is of the greatest length")
            self.rollout_tokens += len(completion)
            self.context_tokens += len(prompt) + len(completion)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""
        self._evaluate(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each."""
        if self.rows != state.global_step * self.task.batch:
            raise SystemExit(f"{self.rows} completions in {state.global_step} steps of {self.task.batch}")
        self._evaluate(state.global_step, kwargs["model"])

    def _evaluate(self, step: int, model: Any) -> None:
        if step not in self.evaluate_at:
            return
        training = model.training
        with forked_rng():
            accuracy = self.task.accuracy(model.eval())
        model.train(training)
        self.curve.append(Point(step, accuracy, self.rollout_tokens, self.context_tokens))


def adapted(student: Any) -> Any:
    """The student with a new adapter."""
    return get_peft_model(
        student, LoraConfig(r=32, lora_alpha=64, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def arguments(task: Task, steps: int, rate: float, seed: int) -> dict[str, Any]:
    """Settings of all trainers; all others are their own defaults."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl_opd-learning"),
        "max_steps": steps,
        "per_device_train_batch_size": task.batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": max(1, steps // 10),
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "bf16": False,
        "use_cpu": True,
        "seed": seed,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def teacher_samples(task: Task, teacher: Any, rows: int, seed: int) -> Dataset:
    """The prompts of the pool in turns, each time with another sample of the teacher; ids and labels."""
    set_seed(seed)
    tokenizer, pool = task.tokenizer(), task.prompts()["prompt"][:]
    prompts: list[str] = []
    while len(prompts) < rows:
        prompts += random.sample(pool, len(pool))
    found: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for start in range(0, rows, 1024):
        part = prompts[start : min(start + 1024, rows)]
        for ids, completion in zip(tokenizer(part)["input_ids"], task.write(teacher, part, sample=True), strict=True):
            found["input_ids"].append(ids + completion)
            found["labels"].append([-100] * len(ids) + completion)
    return Dataset.from_dict(found)


def make_trainer(arm: str, task: Task, student: Any, teacher: Any, settings: dict[str, Any]) -> Any:
    """A trainer of `student`, which has an adapter; `settings` are of `arguments`."""
    rows, tokenizer = task.prompts(), task.tokenizer()
    if arm == "sft":
        samples = teacher_samples(task, teacher, settings["max_steps"] * task.batch, settings["seed"])
        args = SFTConfig(**settings, activation_checkpointing=False)
        return Sft(model=student, args=args, train_dataset=samples, processing_class=tokenizer)
    settings = settings | {"max_completion_length": task.max_completion_length, "temperature": 1.0}
    if arm == "trl":
        args = DistillationConfig(**settings, activation_checkpointing=False)
        return Distillation(
            model=student,
            teacher_model=teacher,
            args=args,
            train_dataset=rows.select_columns("prompt"),
            processing_class=tokenizer,
        )
    if arm == "grpo":
        args = GRPOConfig(**settings, activation_checkpointing=False, num_generations=GROUP)
        return Grpo(model=student, reward_funcs=exact_match, args=args, train_dataset=rows, processing_class=tokenizer)
    args = OnPolicyDistillationConfig(**settings, activation_checkpointing=False, **OURS[arm])
    return Ours(model=student, teacher_model=teacher, args=args, train_dataset=rows, processing_class=tokenizer)


def train(
    arm: str, task: Task, teacher: Any, *, steps: int, rate: float, seed: int, evaluate_at: Sequence[int]
) -> tuple[Any, Curve]:
    """Trains the task's student, with a new adapter, as `arm`; returns it and how it came along."""
    set_seed(seed)
    student = adapted(task.load("student"))
    watch = Watch(task, evaluate_at)
    trainer = make_trainer(arm, task, student, teacher, arguments(task, steps, rate, seed))
    trainer.watch = watch
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    return student, watch.curve
