"""Which process trains on which dataset rows, and what the completion of each is sampled from.

With several processes the rows of a step are dealt in blocks of whole groups, each block in micro-batches. A block is the same
rows in the same order for any number of processes, and a completion's random numbers belong to its place among all rows, so
that one process and eight write and train on the same completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler


class Row(dict[str, Any]):
    """A dataset row with what the trainer knows of it beside its columns."""

    seed: int | None = None
    """What its completion is sampled from; None: from the global generators."""


class Filler(Row):
    """A row that only makes the processes' shares of the last step equally long: it is neither trained on nor counted.

    A class, since nothing else of a row comes through accelerate's data loader, which copies it.
    """


@dataclass(frozen=True)
class Shares:
    """How rows are dealt to processes.

    Args:
        num_processes: Processes that train on different rows.
        batch_size: Rows of a micro-batch on one process.
        group_size: Consecutive rows that must not be parted.
    """

    num_processes: int
    batch_size: int
    group_size: int = 1

    @property
    def block(self) -> int:
        """Consecutive rows that one process gets: the fewest that are whole micro-batches and whole groups."""
        return math.lcm(self.batch_size, self.group_size)

    def place(self, process: int, number: int) -> int:
        """Place among all rows of the one that `process` gets as its `number`-th."""
        return (number // self.block * self.num_processes + process) * self.block + number % self.block

    def order(self, num_places: int) -> Iterator[int]:
        """The places in the order in which a data loader must read them, whose micro-batches go to the processes in turn."""
        for position in range(num_places):
            micro_batch, offset = divmod(position, self.batch_size)
            number = micro_batch // self.num_processes * self.batch_size + offset
            yield self.place(micro_batch % self.num_processes, number)

    def filled(self, num_rows: int) -> int:
        """`num_rows` and the fillers after them, with which each of several processes has as many."""
        round_size = self.num_processes * self.block
        return num_rows if self.num_processes == 1 else math.ceil(num_rows / round_size) * round_size


class RowSampler(Sampler[int]):
    """Row numbers in an order fixed by (seed, epoch), each `shares.group_size` times; of a filler, `~number`.

    The order does not depend on the global random state, so that a resumed run finds the same one.

    Args:
        num_rows: Rows of the dataset.
        shares: How they are dealt.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the orders.
        drop_last: Whether the data loader drops what does not fill a micro-batch on each process; then there are no fillers.
    """

    def __init__(self, num_rows: int, shares: Shares, *, shuffle: bool, seed: int = 0, drop_last: bool = False) -> None:
        self.num_rows, self.shares, self.shuffle, self.seed, self.drop_last = num_rows, shares, shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rows, repeats = self.order(), self.shares.group_size
        for place in self.shares.order(len(self)):
            row = rows[place // repeats % self.num_rows]
            yield row if place < self.num_rows * repeats else ~row

    def order(self) -> list[int]:
        """The row numbers of the present epoch, each once."""
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def __len__(self) -> int:
        num_places = self.num_rows * self.shares.group_size
        return num_places if self.drop_last else self.shares.filled(num_places)


class SampledRows(Dataset[Row]):
    """What a data loader reads with a `RowSampler`: rows, of which those it marks are fillers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset  # has __len__ and __getitems__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Row]:
        """The rows of a micro-batch, read at once."""
        rows = self.dataset.__getitems__([max(number, ~number) for number in numbers])
        return [Filler(row) if number < 0 else Row(row) for row, number in zip(rows, numbers, strict=True)]


class FilledStream(IterableDataset[Row]):
    """A stream with fillers after its end, so that each of several processes has as many rows.

    Args:
        dataset: The stream.
        round_size: Rows of a micro-batch on all processes together; of a multiple of it there will be.
    """

    def __init__(self, dataset: datasets.IterableDataset, round_size: int) -> None:
        self.dataset, self.round_size = dataset, round_size

    def set_epoch(self, epoch: int) -> None:
        """Passes it on to the stream, which may be shuffled."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Row]:
        count, row = 0, {}
        for row in self.dataset:
            yield Row(row)
            count += 1
        for _ in range(-count % self.round_size):
            yield Filler(row)


def with_seeds(rows: Sequence[dict[str, Any]], places: Sequence[int], *stream: int) -> list[dict[str, Any]]:
    """The rows as `Row`s, each with the seed of its completion.

    Args:
        rows: Those of this process.
        places: The place of each among the rows of all processes.
        stream: Non-negative numbers that tell this rollout from others.
    """
    seeded: list[dict[str, Any]] = []
    for row, place in zip(rows, places, strict=True):
        own = Filler(row) if isinstance(row, Filler) else Row(row)
        own.seed = int(np.random.SeedSequence((*stream, place)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        seeded.append(own)
    return seeded


def repeat_rows(dataset: datasets.IterableDataset, repeats: int) -> datasets.IterableDataset:
    """Each row of a stream `repeats` times in a row."""
    if repeats == 1:
        return dataset
    return dataset.map(
        lambda columns: {name: [value for value in values for _ in range(repeats)] for name, values in columns.items()},
        batched=True,
        batch_size=1,
    )
