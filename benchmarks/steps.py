"""Time of an optimizer step: trl_opd, TRL's DistillationTrainer and a bare loop on the same work.

    python benchmarks/steps.py

Student and teacher are SmolLM2-135M, the student with LoRA r=32 on all linear layers. The arms take turns, a step each, in an
order that changes from round to round; figures are medians over the rounds, ratios those of a round. Each arm's first step, on
short texts, is not counted. Lengths of completions are forced, and the trained tokens of all arms compared.

Writes benchmarks/results/bench.json; `write_docs.py` makes the tables of docs/benchmarks.md and a picture of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from statistics import median
from typing import Any

import torch
from arms import ARMS, PHASES, Arm, Setting, Step, make_arm
from heal_pruned import load_smollm2
from report import load, save, table
from works import WORKS, Work


def measure(setting: Setting, names: list[str], pairs: int) -> dict[str, list[Step]]:
    """The steps of each arm, round by round."""
    arms = [make_arm(name, setting, pairs) for name in names]
    for arm in arms:
        _check(arm, arm.step(), setting.work.warm_up())
    steps: dict[str, list[Step]] = {name: [] for name in names}
    for number in range(pairs):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            release_memory()
            step = arm.step()
            _check(arm, step, setting.work)
            steps[arm.name].append(step)
            print(f"{setting.work.name} round {number + 1}/{pairs} {arm.name}: {step.seconds:.2f} s", flush=True)
    for arm in arms:
        arm.close()
    return steps


def release_memory() -> None:
    """Gives back to the system what the last arm's thread has freed: each thread keeps its own, and W2 needs it all."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _check(arm: Arm, step: Step, work: Work) -> None:
    if step.tokens != work.trained_tokens:
        raise SystemExit(f"{arm.name} trained on {step.tokens} tokens of {work.name}, not {work.trained_tokens}")


def figures(work: Work, steps: dict[str, list[Step]]) -> dict[str, Any]:
    """All that was measured, for the file of results."""
    raw = {name: {"seconds": [round(step.seconds, 4) for step in own], **_phases(own)} for name, own in steps.items()}
    return {
        "prompts": len(work.prompt_tokens),
        "generations": work.num_generations,
        "tokens": work.trained_tokens,
        "arms": raw,
    }


def _phases(steps: list[Step]) -> dict[str, Any]:
    return {"phases": {phase: [round(step.phases[phase], 4) for step in steps] for phase in PHASES}}


def show(work: str, found: dict[str, Any]) -> str:
    """A table of one work's arms."""
    arms = found["arms"]

    def ratio(name: str, other: str) -> str:
        if other not in arms:
            return ""
        pairs = zip(arms[name]["seconds"], arms[other]["seconds"], strict=True)
        return f"{median(own / theirs for own, theirs in pairs):.2f}"

    rows = []
    for name, own in arms.items():
        seconds = own["seconds"]
        phases = [f"{median(own['phases'][phase]):.2f}" for phase in PHASES[:-1]]
        rest = median(part / whole for part, whole in zip(own["phases"]["rest"], seconds, strict=True))
        spread = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        rows.append([name, spread, ratio(name, "trl"), ratio(name, "bare"), *phases, f"{rest:.1%}"])
    head = [f"{work}: {found['tokens']} tokens", "seconds (least-most)", "x TRL", "x bare", *PHASES]
    return table(head, rows)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_smollm2()
    teacher, _ = load_smollm2()
    found = {}
    for name in options.works:
        setting = Setting(model, teacher.eval().requires_grad_(False), tokenizer, WORKS[name])
        found[name] = figures(WORKS[name], measure(setting, options.arms, options.pairs))
        print(show(name, found[name]), flush=True)
        gc.collect()
        if not options.dry:
            save("steps", {"works": load().get("steps", {}).get("works", {}) | {name: found[name]}})


if __name__ == "__main__":
    main()
