"""What `learning.py` makes of accuracies and counts of tokens: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any


@dataclass(frozen=True)
class Point:
    """What a run had done, and how good its student was, after a number of optimizer steps."""

    step: int
    accuracy: float
    rollout_tokens: int
    """Tokens of completions that were trained on: written by the student, or, of SFT, by the teacher."""
    context_tokens: int
    """Those with their prompts, as each pass reads them."""


Curve = list[Point]


def curve_of(points: Sequence[dict[str, Any]]) -> Curve:
    """As it stands in the file of results."""
    return [Point(**point) for point in points]


def as_points(curve: Curve) -> list[dict[str, Any]]:
    """For the file of results."""
    return [asdict(point) for point in curve]


def matrix_weights(model: Any) -> int:
    """N: weights that a token is multiplied with, which are all but the embedding's (a look-up) and the norms'."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return sum(p.numel() for p in model.parameters() if p.dim() == 2 and (tied or p is not embedding))


FORWARD, BACKWARD = 2, 4


def flops(arm: str, context_tokens: int, student_weights: int, teacher_weights: int) -> int:
    """Floating-point operations of a run: 2·N for a token of a forward pass, 4·N of a backward pass.

    A token is read once while it is generated (by the student; of SFT by the teacher), once by a teacher that scores it, and
    trained on once, forward and backward. Left out: evaluation, attention, and that LoRA needs no gradient of most weights.
    """
    student = FORWARD + BACKWARD if arm == "sft" else FORWARD + FORWARD + BACKWARD
    teacher = 0 if arm == "grpo" else FORWARD
    return context_tokens * (student * student_weights + teacher * teacher_weights)


def gap_recovery(accuracy: float, student: float, teacher: float) -> float:
    """How much of the way from student to teacher an accuracy is: 0 to 1, or beyond."""
    return (accuracy - student) / (teacher - student)


def first_reach(curve: Curve, target: float) -> Point | None:
    """The first evaluation with at least that accuracy, or None."""
    return next((point for point in curve if point.accuracy >= target), None)


def best_rate(final: dict[float, float]) -> float:
    """The learning rate of the best final accuracy; of equal ones the smallest."""
    return min(final, key=lambda rate: (-final[rate], rate))


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Mean (least to most)."""
    return f"{show(mean(values))} ({show(min(values))} to {show(max(values))})"


def spread_reached(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The same of runs that reached something, and how many did where not all."""
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    return spread(reached, show) + ("" if len(reached) == len(values) else f", {len(reached)} of {len(values)} runs")
