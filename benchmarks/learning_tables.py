"""Tables and picture of what `learning.py` found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from learning_figures import best_rate, curve_of, first_reach, flops, gap_recovery, spread, spread_reached
from matplotlib.figure import Figure
from report import table

RESULTS = Path(__file__).parent / "results" / "learning.json"
TARGETS = (0.5, 0.8)
"""Gap recoveries whose cost is told."""
GAIN = 0.95
"""Of the headline: so much of the teacher's gain is to be reached."""
Run = dict[str, Any]


def run_key(task: str, arm: str, steps: int, batch: int, rate: float, seed: int) -> str:
    """The name of a run in the file of results: its settings."""
    return f"{task}/{arm}/{steps}x{batch}/rate {rate:g}/seed {seed}"


def by_arm(found: dict[str, Any], task: str) -> dict[str, list[Run]]:
    """All runs of a task."""
    arms: dict[str, list[Run]] = defaultdict(list)
    for run in found["runs"].values():
        if run["task"] == task:
            arms[run["arm"]].append(run)
    return arms


def reported(found: dict[str, Any], task: str) -> dict[str, list[Run]]:
    """The runs of each arm that are told: those of the chosen rate, but for the seed it was chosen by (the least)."""
    told = {}
    for arm, runs in by_arm(found, task).items():
        seed = min(run["seed"] for run in runs)
        rate = best_rate({run["rate"]: run["curve"][-1]["accuracy"] for run in runs if run["seed"] == seed})
        told[arm] = [run for run in runs if run["rate"] == rate and run["seed"] != seed]
    return {arm: runs for arm, runs in told.items() if runs}


def costs(found: dict[str, Any], run: Run, target: float) -> tuple[int, float] | None:
    """Rollout tokens and GFLOPs until a gap recovery was first seen."""
    pair = found["tasks"][run["task"]]
    point = first_reach(curve_of(run["curve"]), pair["student"] + target * (pair["teacher"] - pair["student"]))
    return point and (point.rollout_tokens, gflops(pair, run["arm"], point.context_tokens))


def gflops(pair: dict[str, Any], arm: str, context_tokens: int) -> float:
    """10^9 floating-point operations."""
    return flops(arm, context_tokens, pair["student_weights"], pair["teacher_weights"]) / 1e9


def show_task(found: dict[str, Any], task: str) -> str:
    """A row for each arm."""
    pair, rows = found["tasks"][task], []
    for arm, runs in reported(found, task).items():
        last = [curve_of(run["curve"])[-1] for run in runs]
        recovered = [gap_recovery(point.accuracy, pair["student"], pair["teacher"]) for point in last]
        reached = [[costs(found, run, target) for run in runs] for target in TARGETS]
        rows.append(
            [
                arm,
                f"{runs[0]['rate']:g}",
                str(len(runs)),
                f"{mean(point.accuracy for point in last):.3f}",
                spread(recovered, "{:.2f}".format),
                *(spread_reached([cost and cost[0] / 1e3 for cost in costs], "{:.1f}".format) for costs in reached),
                *(spread_reached([cost and cost[1] for cost in costs], "{:.0f}".format) for costs in reached),
                f"{mean(point.rollout_tokens for point in last) / 1e3:.1f}",
                f"{mean(gflops(pair, arm, point.context_tokens) for point in last):.0f}",
            ]
        )
    tokens, operations = ([f"{unit} to {target:.0%}" for target in TARGETS] for unit in ("1,000 tokens", "GFLOP"))
    head = [
        task,
        "learning rate",
        "seeds",
        "accuracy",
        "gap recovery",
        *tokens,
        *operations,
        "1,000 tokens, all",
        "GFLOP, all",
    ]
    steps = next(iter(reported(found, task).values()), [{"steps": 0, "batch": 0}])[0]
    title = (
        f"`{task}`: student {pair['student']:.3f}, teacher {pair['teacher']:.3f}; "
        f"{steps['steps']} steps of {steps['batch']} completions; N = {pair['student_weights']:,}"
    )
    return f"{title}\n\n{table(head, rows)}"


def show_quickest(found: dict[str, Any], task: str) -> str:
    """Of each arm, the rate that was first at a gap recovery, among the runs that the rates were chosen by."""
    arms, rows = by_arm(found, task), []
    for arm in reported(found, task):
        seed = min(run["seed"] for run in arms[arm])
        row = [arm]
        for target in TARGETS:
            spent = [(costs(found, run, target), run["rate"]) for run in arms[arm] if run["seed"] == seed]
            first = min(((cost[0], cost[1], rate) for cost, rate in spent if cost), default=None)
            row.append(f"{first[0] / 1e3:.1f}, {first[1]:.0f} (rate {first[2]:g})" if first else "not reached")
        rows.append(row)
    return table([f"{task}, quickest rate", *(f"1,000 tokens, GFLOP to {target:.0%}" for target in TARGETS)], rows)


def show_headline(entries: Sequence[Run]) -> str:
    """A row for each seed but the one that the rates were chosen by (the least)."""
    chosen_by, rows = min(entry["seed"] for entry in entries), []
    for entry in entries:
        if entry["seed"] == chosen_by:
            continue
        grpo, runs = curve_of(entry["grpo"]), entry["distilled"]
        start, teacher = grpo[0].accuracy, grpo[-1].accuracy
        target = start + GAIN * (teacher - start)
        own = first_reach(grpo, target)
        assert own is not None  # its last point is the teacher
        enough = next((run["steps"] for run in runs if run["accuracy"] >= target), None)
        ratios = (f"{steps / enough:.1f}" if enough else "" for steps in (grpo[-1].step, own.step))
        ends = (f"{run['accuracy']:.3f} ({gap_recovery(run['accuracy'], start, teacher):.2f})" for run in runs)
        rows.append(
            [
                str(entry["seed"]),
                f"{start:.3f}",
                f"{teacher:.3f} ({grpo[-1].step})",
                str(own.step),
                *ends,
                str(enough or "not reached"),
                *ratios,
            ]
        )
    share = f"{GAIN:.0%}"
    head = [
        "seed",
        "student",
        "GRPO teacher (steps)",
        f"GRPO's steps to {share} of its gain",
        *(f"distilled in {run['steps']} steps, rate {run['rate']:g} (of the gain)" for run in entries[-1]["distilled"]),
        f"steps that reach {share}",
        "× fewer than GRPO's run",
        f"× fewer than GRPO to {share}",
    ]
    return table(head, rows)


def show(found: dict[str, Any]) -> str:
    """All tables."""
    tasks = [task for task in found["tasks"] if reported(found, task)]
    shown = [text for task in tasks for text in (show_task(found, task), show_quickest(found, task))]
    return "\n\n".join([*shown, *([show_headline(list(found["headline"].values()))] if found["headline"] else [])])


def draw(found: dict[str, Any], path: Path) -> None:
    """Gap recovery over tokens and over FLOPs: the mean of the seeds, and from the least to the most."""
    tasks = [task for task in found["tasks"] if reported(found, task)]
    figure = Figure(figsize=(10, 3.4 * len(tasks)), layout="constrained")
    for places, task in zip(figure.subplots(len(tasks), 2, squeeze=False, sharey="row"), tasks, strict=True):
        pair = found["tasks"][task]
        for arm, runs in reported(found, task).items():
            curves = [curve_of(run["curve"]) for run in runs]
            recovered = [
                [gap_recovery(point.accuracy, pair["student"], pair["teacher"]) for point in points]
                for points in zip(*curves, strict=True)
            ]
            spent = [
                [mean(point.rollout_tokens for point in points) / 1e3 for points in zip(*curves, strict=True)],
                [mean(gflops(pair, arm, point.context_tokens) for point in points) for points in zip(*curves, strict=True)],
            ]
            for axes, over in zip(places, spent, strict=True):
                axes.plot(over, [mean(values) for values in recovered], label=arm, marker=".", markersize=4, linewidth=1.2)
                axes.fill_between(over, [min(v) for v in recovered], [max(v) for v in recovered], alpha=0.12)
        for axes, unit in zip(places, ("1,000 tokens trained on", "GFLOP"), strict=True):
            axes.set(xlabel=unit, title=task, ylim=(-0.6, 1.1))
            axes.axhline(1, color="grey", linewidth=0.5)
            axes.grid(alpha=0.3)
        places[0].set_ylabel("gap recovery")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right", fontsize="small")
    figure.savefig(path, dpi=110)
