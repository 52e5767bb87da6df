"""Several datasets in one run: how many prompts of each a rollout has, and in which order.

A rollout holds exactly `prompts` of each dataset, spread evenly over it, so that each of its optimizer steps and of the
processes gets a mix. The order is a list of prompts fixed by (seed, epoch); how prompts become places of completions, and
places the rows of a process, is that of one dataset (`rows.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Dataset

from .config import OnPolicyDistillationConfig, as_dict
from .rows import RowSampler, Shares

DATASET = "dataset"
"""Column with the name of a row's dataset, where there are several."""
TEACHER = "teacher"
"""Column with the name of a row's teacher, where there are several."""


class NamedRows(Dataset[dict[str, Any]]):
    """The rows of one or several datasets, those of the first before those of the second, each with its dataset's name.

    Every row has every column that one of the datasets has, None where its own has not.

    Args:
        parts: The datasets by name.
        labels: Columns that hold the name, in datasets that have no such column of their own.
    """

    def __init__(self, parts: dict[str, datasets.Dataset], labels: Sequence[str]) -> None:
        self.parts, self.labels = parts, tuple(labels)
        self.starts = [0, *accumulate(len(part) for part in parts.values())]
        columns = dict.fromkeys(column for part in parts.values() for column in part.column_names)
        self.blank: dict[str, Any] = dict.fromkeys(columns)

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each dataset."""
        return {name: len(part) for name, part in self.parts.items()}

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """The rows of a micro-batch, read at once from each dataset."""
        rows: dict[int, dict[str, Any]] = {}
        owners = [bisect_right(self.starts, number) - 1 for number in numbers]
        for owner, (name, part) in enumerate(self.parts.items()):
            asked = [i for i, other in enumerate(owners) if other == owner]
            read = part.__getitems__([numbers[i] - self.starts[owner] for i in asked]) if asked else []
            named = self.blank | dict.fromkeys(self.labels, name)
            rows |= {i: named | row for i, row in zip(asked, read, strict=True)}
        return [rows[i] for i in range(len(numbers))]


@dataclass(frozen=True)
class Mixture:
    """How many prompts of each dataset a rollout has, and how many rollouts an epoch.

    Args:
        sizes: Rows of each dataset.
        prompts: Prompts of each in a rollout, at least 1 and at most its size.
        all_exhausted: Whether an epoch ends when the last dataset has been gone through, and not the first. The others are
            then gone through again.
    """

    sizes: tuple[int, ...]
    prompts: tuple[int, ...]
    all_exhausted: bool = False

    @property
    def rollouts(self) -> int:
        """Rollouts of an epoch."""
        pairs = list(zip(self.sizes, self.prompts, strict=True))
        return max(math.ceil(s / p) for s, p in pairs) if self.all_exhausted else min(s // p for s, p in pairs)

    def slots(self) -> list[int]:
        """Whose turn it is in a rollout: each dataset's prompts at even distances, so that any part of it is mixed alike."""
        turns = [((2 * i + 1) / (2 * count), part) for part, count in enumerate(self.prompts) for i in range(count)]
        return [part for _, part in sorted(turns)]

    def order(self, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """The row numbers of an epoch, in all datasets put one after the other."""
        starts = [0, *accumulate(self.sizes)]
        streams = [
            iter(self._stream(part, [seed, epoch, part] if shuffle else None, starts[part])) for part in range(len(self.sizes))
        ]
        return [next(streams[part]) for part in self.slots() * self.rollouts]

    def _stream(self, part: int, seed: list[int] | None, start: int) -> list[int]:
        """The rows of one dataset for a whole epoch: all of them in some order, then all in another order, and so on."""
        size, needed = self.sizes[part], self.prompts[part] * self.rollouts
        passes = [
            np.arange(size) if seed is None else np.random.default_rng([*seed, number]).permutation(size)
            for number in range(math.ceil(needed / size))
        ]
        return (start + np.concatenate(passes)[:needed]).tolist()


class MixedSampler(RowSampler):
    """A `RowSampler` over several datasets; an epoch is a number of whole rollouts, so that there are never fillers."""

    def __init__(self, mixture: Mixture, shares: Shares, *, shuffle: bool, seed: int = 0) -> None:
        super().__init__(sum(mixture.prompts) * mixture.rollouts, shares, shuffle=shuffle, seed=seed)
        self.mixture = mixture

    def order(self) -> list[int]:
        """The row numbers of the present epoch."""
        return self.mixture.order(self.seed, self.epoch, self.shuffle)


def name_column(train_dataset: Any, teacher: Any) -> str | None:
    """The column by whose values the teacher KL is told apart; None if there is one dataset and one teacher."""
    if isinstance(train_dataset, dict):
        return DATASET
    return TEACHER if isinstance(teacher, dict) else None


def make_mixture(sizes: dict[str, int], args: OnPolicyDistillationConfig) -> Mixture:
    """The mixture that the settings ask for.

    Raises:
        ValueError: If they do not fit the datasets or the size of a rollout.
    """
    total = args.step_batch_size * args.world_size * args.num_substeps // args.num_generations
    found = (
        f"A rollout has {total} prompts over all processes (per_device_train_batch_size {args.per_device_train_batch_size} x "
        f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {args.world_size} processes x num_substeps "
        f"{args.num_substeps} / num_generations {args.num_generations})"
    )
    asked = as_dict(args.prompts_per_step)
    if not asked and total < len(sizes):
        raise ValueError(f"{found}, which is not one for each of the {len(sizes)} datasets. Make it larger.")
    prompts = asked or proportional(sizes, total)
    if set(prompts) != set(sizes):
        raise ValueError(
            f"prompts_per_step names {sorted(prompts)}, but train_dataset has {sorted(sizes)}. Give each dataset its number."
        )
    if sum(prompts.values()) != total:
        raise ValueError(
            f"{found}, but prompts_per_step adds up to {sum(prompts.values())}: {prompts}. Change either, so that they agree."
        )
    for name, size in sizes.items():
        if size < prompts[name]:
            raise ValueError(
                f"train_dataset['{name}'] has {size} prompts, but each rollout takes {prompts[name]} of it. Add prompts, or "
                "lower its number in prompts_per_step."
            )
    all_exhausted = args.stopping_strategy == "all_exhausted"
    return Mixture(tuple(sizes.values()), tuple(prompts[name] for name in sizes), all_exhausted)


def proportional(sizes: dict[str, int], total: int) -> dict[str, int]:
    """`total` prompts dealt to the datasets in proportion to their size, at least one to each."""
    prompts, whole = dict.fromkeys(sizes, 1), sum(sizes.values())
    for _ in range(total - len(sizes)):
        neediest = max(sizes, key=lambda name: sizes[name] * total / whole - prompts[name])
        prompts[neediest] += 1
    return prompts
