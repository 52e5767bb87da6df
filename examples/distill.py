"""Distils a teacher into a student on the student's own completions.

With no arguments it shows the whole thing on a CPU in about two minutes, offline: a tiny student that adds three-digit numbers
right about half of the time learns from a teacher that nearly always does (`addition.py`).

    accelerate launch examples/distill.py

With arguments it takes any model and dataset with a `prompt` column, as `trl-opd train` does:

    accelerate launch examples/distill.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-4B \\
        --dataset_name trl-lib/DeepMath-103K --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules all-linear \\
        --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --max_steps 100 \\
        --max_completion_length 1024 --output_dir qwen3-0.6b-distilled

Any setting can also stand in a YAML file, `--config run.yaml`. `--eval_strategy steps` evaluates on the test split.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import addition
import datasets
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer
from trl_opd.arguments import Parser
from trl_opd.curves import series
from trl_opd.scripts import distill, load_data, make_trainer

DEMO: dict[str, Any] = {
    "model_name_or_path": str(addition.FOLDER / "student"),
    "teacher_model_name_or_path": str(addition.FOLDER / "teacher"),
    "output_dir": "distilled-addition",
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_modules": "all-linear",
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 500,
    "max_steps": 320,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 20,
    "max_completion_length": addition.MAX_COMPLETION_LENGTH,
    "activation_checkpointing": False,
    "logging_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 40,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    """Parses the command line, trains, saves the student and shows what came of it."""
    parser = Parser([], "distill.py", __doc__ or "")
    data_args, args, model_args = parser.parse(sys.argv[1:])
    demo = model_args.model_name_or_path is None
    if demo:
        parser.set_defaults(**DEMO)
        data_args, args, model_args = parser.parse(sys.argv[1:])
    train, test = demo_data(args) if demo else load_data(data_args, args)
    trainer = make_trainer(args, model_args, train, test, evaluators=[addition_accuracy] if demo else None)
    done = distill(trainer, data_args.dataset_name) is None
    if done and trainer.is_world_process_zero():
        report(trainer, teacher_accuracy() if demo else None)
    trainer.accelerator.end_training()  # several processes part in order


def demo_data(args: OnPolicyDistillationConfig) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Fresh problems for every step, and 500 that are never trained on."""
    prompts = args.max_steps * args.step_batch_size * args.world_size // args.num_generations
    return addition.train_prompts(prompts, args.seed), addition.heldout(500)


def addition_accuracy(trainer: OnPolicyDistillationTrainer) -> dict[str, float]:
    """Evaluator: the student's greedy accuracy on held-out problems."""
    rows = addition.heldout(1000)[:]
    answers = addition.solve(trainer.student(), trainer.processing_class, rows["prompt"])
    return {"accuracy": addition.accuracy(answers, rows["answer"])}


def teacher_accuracy() -> float:
    """The teacher's, on the same problems."""
    model = AutoModelForCausalLM.from_pretrained(addition.FOLDER / "teacher")
    rows = addition.heldout(1000)[:]
    answers = addition.solve(model, addition.make_tokenizer(), rows["prompt"])
    return addition.accuracy(answers, rows["answer"])


def report(trainer: OnPolicyDistillationTrainer, teacher: float | None) -> None:
    """Prints the held-out figures before and after, draws the curves, and says where the student is."""
    history, folder = trainer.state.log_history, Path(str(trainer.args.output_dir))
    kls, accuracies = series(history, "eval_teacher_kl"), series(history, "eval_accuracy")
    console = Console()
    if kls:
        table = Table("held-out", "before", "after", "teacher", title=f"seed {trainer.args.seed}")
        if accuracies and teacher is not None:
            table.add_row("greedy accuracy", f"{accuracies[0][1]:.3f}", f"{accuracies[-1][1]:.3f}", f"{teacher:.3f}")
        table.add_row("reverse KL, nats a token", f"{kls[0][1]:.4f}", f"{kls[-1][1]:.4f}", "0")
        console.print(table)
    if accuracies and teacher is not None:
        before, after = accuracies[0][1], accuracies[-1][1]
        console.print(f"gap recovery {(after - before) / (teacher - before):.3f}")
        console.print(f"held-out reverse KL fell {kls[0][1] / max(kls[-1][1], 1e-9):.1f}-fold")
    console.print(f"student saved in {folder}, curves in {folder / 'curves.png'}")


if __name__ == "__main__":
    main()
