"""Distils a teacher into a student on the student's own completions.

With no arguments it shows the whole thing on a CPU in about two minutes, offline: a tiny student that adds three-digit numbers
right about half of the time learns from a teacher that nearly always does (`addition.py`).

    accelerate launch examples/distill.py

With arguments it takes any model and dataset with a `prompt` column:

    accelerate launch examples/distill.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-4B \\
        --dataset_name trl-lib/DeepMath-103K --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules all-linear \\
        --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --max_steps 100 \\
        --max_completion_length 1024 --output_dir qwen3-0.6b-distilled

Any setting can also stand in a YAML file, `--config run.yaml`. `--eval_strategy steps` evaluates on the test split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import addition
import datasets
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from trl import ModelConfig, ScriptArguments, TrlParser

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer
from trl_opd.scripts import load_data, make_trainer

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
    parser = TrlParser((ScriptArguments, OnPolicyDistillationConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(lora_dropout=0.0)  # dropout is off in training; so adapter_config.json says what was trained
    data_args, args, model_args = parser.parse_args_and_config()
    demo = model_args.model_name_or_path is None
    if demo:
        parser.set_defaults(**DEMO)
        data_args, args, model_args = parser.parse_args_and_config()
    train, test = demo_data(args) if demo else load_data(data_args, args)
    trainer = make_trainer(args, model_args, train, test, evaluators=[addition_accuracy] if demo else None)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer, teacher_accuracy() if demo else None)
    if args.push_to_hub:
        trainer.push_to_hub(dataset=data_args.dataset_name)
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
    curves = {name: points for name in ("teacher_kl", "eval_teacher_kl", "eval_accuracy") if (points := series(history, name))}
    draw(curves, folder / "curves.png")
    console.print(f"student saved in {folder}, curves in {folder / 'curves.png'}")


def series(history: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """(step, value) of a logged figure."""
    return [(entry["step"], entry[name]) for entry in history if name in entry]


def draw(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """One panel a figure, over optimizer steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(*zip(*points, strict=True))
        axes.set(title=name, xlabel="optimizer step", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
