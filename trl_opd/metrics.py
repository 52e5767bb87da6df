"""What is measured during a logging window: sums and counts, reduced over the processes once per log."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.autograd.profiler import record_function

from .advantage import reverse_kl
from .batch import Rollout, ScoredBatch
from .loss import Stats

MAX_VALUES = 2**16
"""Values kept of each distribution, per process and window; of more, every second one is dropped, on all processes."""

SHORT_TEXT = 64
"""Bytes; what zlib adds to shorter texts would hide what it takes away."""


class Metrics:
    """Collects the figures of one logging window.

    A mean is a sum and a count, so that a token counts the same in whatever micro-batch or process it was. Distributions (for
    quantiles) and extremes are kept beside them. Sums and distributions stay on their device until `reduce`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a new window."""
        self._sums: dict[str, list[Tensor | float]] = {}
        self._values: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1) -> None:
        """Adds `total` over `count` things to the mean called `name`."""
        before = self._sums.setdefault(name, [0.0, 0.0])
        before[0], before[1] = before[0] + total, before[1] + count

    def add_values(self, name: str, values: Tensor) -> None:
        """Adds a 1-d tensor to the mean called `name`, and to its distribution."""
        values = values.detach().float()  # MPS has no float64
        self.add(name, values.sum(), values.numel())
        self._values[name].append(values)

    def count(self, name: str, number: float) -> None:
        """Adds `number` to the total called `name`."""
        self._totals[name] += number

    def add_extremes(self, values: Tensor, *, low: str | None = None, high: str | None = None) -> None:
        """Keeps the least value under the name `low` and the greatest under `high`."""
        if values.numel() == 0:
            return
        if low is not None:
            self._lows[low] = min(self._lows.get(low, np.inf), values.min().item())
        if high is not None:
            self._highs[high] = max(self._highs.get(high, -np.inf), values.max().item())

    def totals(self) -> dict[str, float]:
        """The totals so far over all processes (each must call this); the window goes on."""
        return _summed(gather_object([dict(self._totals)]))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to `time/<phase>`; in a trace it is a span of that name."""
        start = time.perf_counter()
        try:
            with record_function(phase):
                yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def reduce(self) -> dict[str, float]:
        """The figures of the window over all processes (each must call this), which then begins anew.

        `time/*` are seconds of the window on the slowest process; `time/window` is its whole length.
        """
        own = self.window()
        self.reset()
        return _summarize(gather_object([own]))

    def window(self) -> dict[str, Any]:
        """What this process has collected."""
        return {
            "sums": {name: (float(total), float(count)) for name, (total, count) in self._sums.items()},
            "values": {name: _thinned(torch.cat(values)) for name, values in self._values.items()},
            "totals": self._totals,
            "lows": self._lows,
            "highs": self._highs,
            "seconds": {**self._seconds, "window": time.perf_counter() - self._started},
        }


def record_rollout(metrics: Metrics, rollout: Rollout, teacher_logps_BT: Tensor, name_column: str | None = None) -> None:
    """Adds what can be said of completions and their scores before any update; the KL also by the names in a column."""
    lengths_B, stopped_B = rollout.completion_lengths_B, rollout.stopped_B
    kl_BT = reverse_kl(rollout.sampled_logps_BT, teacher_logps_BT, rollout.mask_BT)
    metrics.add_values("teacher_kl", kl_BT[rollout.mask_BT])
    names = [row.get(name_column) for row in rollout.rows] if name_column is not None else []
    for name in dict.fromkeys(name for name in names if name is not None):
        own_B = torch.tensor([other == name for other in names], device=kl_BT.device)
        metrics.add(f"teacher_kl/{name}", kl_BT[own_B].sum(), rollout.mask_BT[own_B].sum())
    metrics.add("prompts/truncated_fraction", rollout.prompt_cut_B.sum(), len(rollout))
    metrics.add("completions/mean_length", lengths_B.sum(), len(rollout))
    metrics.add_extremes(lengths_B, low="completions/min_length", high="completions/max_length")
    metrics.add("completions/stopped_fraction", stopped_B.sum(), len(rollout))
    metrics.add("completions/truncated_fraction", (~stopped_B).sum(), len(rollout))
    if rollout.tool_use is not None:
        calls = sum(use.calls for use in rollout.tool_use)
        metrics.add("tools/call_frequency", calls, len(rollout))
        metrics.add("tools/calling_fraction", sum(use.calls > 0 for use in rollout.tool_use), len(rollout))
        metrics.add("tools/failure_frequency", sum(use.failures for use in rollout.tool_use), calls)
    metrics.count("tokens", int(rollout.mask_BT.sum()))
    prompts = rollout.teacher_prompts
    prompt_tokens = int(rollout.prompt_lengths_B.sum()) if prompts is None else sum(map(len, prompts))
    metrics.count("teacher_tokens", prompt_tokens + int(lengths_B.sum()))


def record_texts(metrics: Metrics, texts: Sequence[str]) -> None:
    """Adds how many times shorter zlib makes completions, each alone; those of fewer than `SHORT_TEXT` bytes do not count."""
    for text in (text.encode(errors="replace") for text in texts):
        if len(text) >= SHORT_TEXT:
            metrics.add("completions/compression_ratio", len(text), len(zlib.compress(text)))


def record_rewards(metrics: Metrics, rewards_BF: Tensor, totals_B: Tensor, names: Sequence[str]) -> None:
    """Adds the mean of the weighted rewards and of each function's, over the rows it applies to."""
    columns = {"reward": totals_B, **{f"reward/{name}": rewards_BF[:, i] for i, name in enumerate(names)}}
    for name, values in columns.items():
        metrics.add(name, values.nansum(), (~values.isnan()).sum())


def record_update(metrics: Metrics, batch: ScoredBatch, logps_BT: Tensor, entropy_BT: Tensor, stats: Stats) -> None:
    """Adds what a micro-batch of an update shows."""
    mask_BT = batch.mask_BT
    for name, (total, count) in stats.items():
        metrics.add(name, total, count)
    metrics.add_values("advantage/mean", batch.advantages_BT[mask_BT])
    metrics.add("entropy", entropy_BT[mask_BT].sum(), mask_BT.sum())
    metrics.add_extremes((logps_BT.detach() - batch.sampled_logps_BT)[mask_BT].exp(), high="ratio/max")


def _summarize(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Joins the windows of all processes into one set of figures."""
    sums: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    values: defaultdict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
    figures = _summed([window["totals"] for window in windows])
    for window in windows:
        for name, pair in window["sums"].items():
            sums[name] = sums[name] + pair
        for name, thinned in window["values"].items():
            values[name].append(thinned)
        for name, value in window["lows"].items():
            figures[name] = min(figures.get(name, value), value)
        for name, value in window["highs"].items():
            figures[name] = max(figures.get(name, value), value)
        for phase, seconds in window["seconds"].items():
            figures[f"time/{phase}"] = max(figures.get(f"time/{phase}", 0.0), seconds)
    figures |= {name: float(total / count) for name, (total, count) in sums.items() if count}
    figures |= _derived(figures, {name: _joined(parts) for name, parts in values.items()})
    return figures


def _summed(totals: Sequence[dict[str, float]]) -> dict[str, float]:
    """The totals of all processes, name by name."""
    return {name: sum(own.get(name, 0.0) for own in totals) for name in dict.fromkeys(name for own in totals for name in own)}


def _derived(means: dict[str, float], values: dict[str, np.ndarray]) -> dict[str, float]:
    """The figures that are not plain means; takes "ratio/square", which serves only for one of them, out of `means`."""
    figures: dict[str, float] = {}
    if (kl := values.get("teacher_kl")) is not None and len(kl):
        figures["teacher_kl/p99"] = float(np.quantile(kl, 0.99, method="inverted_cdf"))  # -inf of a teacher: inf, not NaN
    if (advantages := values.get("advantage/mean")) is not None and len(advantages):
        sizes = np.sort(np.abs(advantages))[::-1]
        top = max(1, len(sizes) // 100)
        figures["advantage/std"] = float(advantages.std())
        figures["advantage/frac_negative"] = float((advantages < 0).mean())
        figures["advantage/top1pct_share"] = float(sizes[:top].sum() / sizes.sum()) if sizes.any() else 0.0
    if square := means.pop("ratio/square", 0.0):
        figures["ratio/ess"] = means["ratio/mean"] ** 2 / square
    return figures


def _thinned(values: Tensor) -> tuple[int, np.ndarray]:
    """At most `MAX_VALUES` of them, and of how many each is one."""
    stride = 1
    while len(values) > MAX_VALUES * stride:
        stride *= 2
    return stride, values[::stride].cpu().numpy()


def _joined(parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """The values of all processes, thinned alike: a process with fewer of them must not weigh more."""
    widest = max(stride for stride, _ in parts)
    return np.concatenate([values[:: widest // stride] for stride, values in parts])
