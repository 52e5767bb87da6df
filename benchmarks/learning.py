"""Who learns most from how many tokens: SFT, TRL's DistillationTrainer and GRPOTrainer, and trl_opd, on two small tasks.

    python benchmarks/learning.py
    python benchmarks/learning.py --tasks chain --arms sampled full --seeds 1

Each arm trains the same student on the same prompts with the same batch, optimizer and schedule (`learning_arms.py`). Its
learning rate is that of `RATES` with the best final accuracy in a run with seed `CHOICE_SEED`, which is not reported.

`headline` makes a teacher from the student of `addition` by GRPO, and distils it back into that student: in runs of several
lengths, to see how few steps are enough; each length's learning rate is chosen in the same way.

A run is written to benchmarks/results/learning.json as it ends, and not repeated: a command that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from learning_arms import ARMS, train
from learning_figures import as_points, best_rate, matrix_weights
from learning_tables import RESULTS, run_key, show
from learning_tasks import TASKS, Task
from report import load, machine

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
CHOICE_SEED, SEEDS = 0, (1, 2, 3)
FRACTIONS = (0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Of a run, at which its student is evaluated."""
HEADLINE = "headline"
HEADLINE_RATES = RATES[:3]  # at 1e-2 both of its arms fell to nothing
GRPO_STEPS, DISTILL_STEPS = 320, (20, 40, 80, 160)


class Results:
    """The file of results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = load(path) or {"machine": {}, "tasks": {}, "runs": {}, "headline": {}}

    def get(self, part: str, key: str, make: Callable[[], Any]) -> Any:
        """What stands in it under a key; made, and written, if it does not."""
        if key not in self.found[part]:
            start = time.perf_counter()
            made = make()
            self.found[part][key] = made
            self.found["machine"] = machine()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.found) + "\n")
            print(f"{part} {key}: {time.perf_counter() - start:.0f} s", flush=True)
        return self.found[part][key]


def evaluations(steps: int) -> list[int]:
    """The optimizer steps after which a student is evaluated."""
    return sorted({round(fraction * steps) for fraction in FRACTIONS})


def pair(task: Task) -> dict[str, Any]:
    """What is known of a task's models."""
    student, teacher = task.load("student"), task.load("teacher")
    return {
        "student": task.accuracy(student),
        "teacher": task.accuracy(teacher),
        "student_weights": matrix_weights(student),
        "teacher_weights": matrix_weights(teacher),
    }


def run(results: Results, task: Task, arm: str, steps: int, rate: float, seed: int) -> float:
    """Trains, unless that was done; returns the final accuracy."""

    def make() -> dict[str, Any]:
        teacher = task.load("teacher")
        _, curve = train(arm, task, teacher, steps=steps, rate=rate, seed=seed, evaluate_at=evaluations(steps))
        print(" ".join(f"{point.accuracy:.3f}" for point in curve), end="  ", flush=True)
        settings = {"task": task.name, "arm": arm, "steps": steps, "batch": task.batch, "rate": rate, "seed": seed}
        return {**settings, "curve": as_points(curve)}

    return results.get("runs", run_key(task.name, arm, steps, task.batch, rate, seed), make)["curve"][-1]["accuracy"]


def chosen_rate(results: Results, task: Task, arm: str, steps: int) -> float:
    """The learning rate an arm gets on a task."""
    return best_rate({rate: run(results, task, arm, steps, rate, CHOICE_SEED) for rate in RATES})


def headline(results: Results, steps: int | None, seeds: list[int]) -> None:
    """Student → GRPO → teacher → distilled back into the student, in runs of several lengths, each with a rate of its own."""
    task = TASKS["addition"]
    grpo_steps, lengths = steps or GRPO_STEPS, [steps] if steps else DISTILL_STEPS
    grpo_rate = chosen_rate(results, task, "grpo", steps or task.steps)

    def make(seed: int, pairs: list[tuple[int, float]]) -> dict[str, Any]:
        every = max(1, grpo_steps // 32)
        adapted, by_grpo = train(
            "grpo", task, None, steps=grpo_steps, rate=grpo_rate, seed=seed, evaluate_at=range(0, grpo_steps + 1, every)
        )
        teacher = adapted.merge_and_unload().eval().requires_grad_(False)
        runs = []
        for length, rate in pairs:
            _, curve = train("sampled", task, teacher, steps=length, rate=rate, seed=seed, evaluate_at=[0, length])
            runs.append({"steps": length, "rate": rate, "accuracy": curve[-1].accuracy})
            print(f"GRPO {by_grpo[-1].accuracy:.3f}, distilled {runs[-1]}", flush=True)
        return {"seed": seed, "grpo_rate": grpo_rate, "grpo": as_points(by_grpo), "distilled": runs}

    name = f"{grpo_steps} steps of GRPO, rate {grpo_rate:g}, then {'/'.join(map(str, lengths))}"
    tried = [(length, rate) for length in lengths for rate in HEADLINE_RATES]
    choice = results.get(HEADLINE, f"{name}, all rates, seed {CHOICE_SEED}", lambda: make(CHOICE_SEED, tried))
    chosen = [
        (length, best_rate({run["rate"]: run["accuracy"] for run in choice["distilled"] if run["steps"] == length}))
        for length in lengths
    ]
    for seed in seeds:
        told = "/".join(f"{rate:g}" for _, rate in chosen)
        results.get(HEADLINE, f"{name}, rates {told}, seed {seed}", lambda seed=seed: make(seed, chosen))


def main() -> None:
    """Trains what is not there yet and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*TASKS, HEADLINE]
    parser.add_argument("--tasks", nargs="+", default=parts, choices=parts)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="optimizer steps of every run, to try it out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")
    results = Results(options.results)
    for name in options.tasks:
        if name == HEADLINE:
            headline(results, options.steps, options.seeds)
            continue
        task = TASKS[name]
        results.get("tasks", name, lambda task=task: pair(task))
        for arm in options.arms:
            steps = options.steps or task.steps
            rate = chosen_rate(results, task, arm, steps)
            for seed in options.seeds:
                run(results, task, arm, steps, rate, seed)
    print(show(results.found))


if __name__ == "__main__":
    main()
