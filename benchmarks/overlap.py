"""What `rollout_lag=1` saves: time of a step that waits for its rollout, and of one whose rollout was written during another.

    python benchmarks/overlap.py http://localhost:8000

The server is that of `examples/one_server.py`, whose student this is; the teacher is the server's base, or the same model in
the training process. The two ways alternate, a run each time; the figures are medians over the runs' steps but the first two,
and the ratio is that of each pair of runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from heal_pruned import load_smollm2, questions
from one_server import LINEAR, harm

FIRST = 2
"""Steps that are not counted: probes, and a rollout with no step before it."""


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())


def run(server: str, lag: int, steps: int, teacher: Any, batch: int, length: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and the means of what was logged."""
    model, tokenizer = load_smollm2()
    student = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=LINEAR, task_type="CAUSAL_LM"))
    harm(student, strength=0.1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = OnPolicyDistillationTrainer(
            model=student,
            teacher_model=teacher,
            args=OnPolicyDistillationConfig(
                output_dir=folder,
                rollout_engine="vllm",
                vllm_server_base_url=[server],
                rollout_lag=lag,
                max_steps=steps,
                per_device_train_batch_size=batch,
                max_completion_length=length,
                learning_rate=1e-4,
                activation_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=1,
            ),
            train_dataset=questions()[0],
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry][FIRST:]
    names = ("time/sync", "time/rollout", "time/teacher", "time/train", "teacher_kl", "ratio/ess", "rollout/staleness")
    return median(seconds[FIRST - 1 :]), {name: median(entry.get(name, 0.0) for entry in logs) for name in names}


def main() -> None:
    """Prints a line for each run, and the ratios."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("server", metavar="URL")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--length", type=int, default=64)
    chosen = options.parse_args()
    for name in ("server", "in process"):
        ratios = []
        for pair in range(chosen.pairs):
            seconds = []
            for lag in (0, 1) if pair % 2 == 0 else (1, 0):
                teacher = f"{chosen.server}#base" if name == "server" else load_smollm2()[0]
                step, figures = run(chosen.server, lag, chosen.steps, teacher, chosen.batch, chosen.length)
                seconds.append((lag, step))
                told = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
                print(f"teacher {name}, rollout_lag={lag}: {step:.2f} s a step; {told}", flush=True)
            by_lag = dict(seconds)
            ratios.append(by_lag[1] / by_lag[0])
        told = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f"teacher {name}: time of a step with rollout_lag=1 / with 0: {median(ratios):.2f} ({told})", flush=True)


if __name__ == "__main__":
    main()
