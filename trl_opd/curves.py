"""The course of a run's figures: a picture, where matplotlib is installed, and a line of text that needs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
PICTURE = "curves.png"
SHOWN = ("teacher_kl", "reward", "eval_teacher_kl", "eval_reward", "eval_accuracy")
"""Figures that get a panel, as far as they were logged."""


def series(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of each time a figure was logged as a number."""
    found = [(entry["step"], entry.get(name)) for entry in history]
    return [(step, float(value)) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The course of some values in at most `width` blocks, each the mean of its share; the lowest and the highest fill it."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def draw_curves(history: Sequence[Mapping[str, Any]], folder: str | Path) -> str | None:
    """Draws one panel a figure over optimizer steps.

    Args:
        history: `trainer.state.log_history`.
        folder: Gets the picture.

    Returns:
        The picture's name; None if matplotlib is not installed, or there is nothing to draw.
    """
    curves = {name: points for name in SHOWN if len(points := series(history, name)) > 1}
    if not curves or find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(*zip(*points, strict=True))
        axes.set(title=name, xlabel="optimizer step")
        axes.set_ylim(bottom=min(0.0, *(value for _, value in points)))
        axes.grid(alpha=0.3)
    figure.savefig(Path(folder) / PICTURE, dpi=100)
    return PICTURE
