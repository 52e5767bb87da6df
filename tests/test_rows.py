"""Rows dealt to processes: whole groups, the same completions for any number of processes, fillers that count for nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from trl_opd.rows import Filler, Row, RowSampler, SampledRows, Shares, repeat_rows, with_seeds

ONE_PROCESS = Shares(1, 4, group_size=3)
LAYOUTS = [  # processes, micro-batch, group
    (1, 4, 1),
    (2, 4, 1),
    (2, 4, 2),
    (2, 2, 4),
    (3, 6, 4),
    (4, 3, 2),
    (2, 1, 8),
]


def dealt(num_rows: int, shares: Shares, *, shuffle: bool = False, **more: Any) -> list[list[list[int]]]:
    """What accelerate gives each process of a data loader with our sampler: row numbers by micro-batch."""
    sampler = RowSampler(num_rows, shares, shuffle=shuffle, **more)
    drop_last = more.get("drop_last", False)
    batches = BatchSampler(sampler, shares.batch_size, drop_last)
    if shares.num_processes == 1:
        return [list(batches)]
    return [[*BatchSamplerShard(batches, shares.num_processes, i)] for i in range(shares.num_processes)]  # type: ignore[misc]


# ---- Order


def test_sampler_takes_each_row_once_an_epoch_and_keeps_groups_together() -> None:
    order = list(RowSampler(5, ONE_PROCESS, shuffle=True, seed=7))
    assert len(order) == 15 == len(RowSampler(5, ONE_PROCESS, shuffle=True, seed=7))
    groups = [order[i : i + 3] for i in range(0, 15, 3)]
    assert all(len(set(group)) == 1 for group in groups)
    assert sorted(group[0] for group in groups) == [0, 1, 2, 3, 4]


def test_sampler_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = RowSampler(20, Shares(1, 4), shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(seed + 3)  # the global random state plays no part
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(5, 0)


def test_sampler_without_shuffling() -> None:
    sampler = RowSampler(3, Shares(1, 4, group_size=2), shuffle=False)
    sampler.set_epoch(4)
    assert list(sampler) == [0, 0, 1, 1, 2, 2]


# ---- Shares


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_rows", [5, 12, 24])
def test_each_process_gets_whole_groups_and_each_row_once(layout: tuple[int, int, int], num_rows: int) -> None:
    """A process's rows in its own order are whole groups; without the fillers each row is there once a completion."""
    shares = Shares(*layout)
    batches = dealt(num_rows, shares, shuffle=True, seed=3)
    group = shares.group_size
    rows = [[row for batch in own for row in batch] for own in batches]
    for own in rows:
        groups = [own[i : i + group] for i in range(0, len(own), group)]
        assert all(len(set(g)) == 1 and len(g) == group for g in groups)
    real = sorted(row for own in rows for row in own if row >= 0)
    assert real == [row for row in range(num_rows) for _ in range(group)]
    assert len({len(own) for own in batches}) == 1, "a process with fewer micro-batches would leave the others waiting"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_place_is_the_same_row_for_any_number_of_processes(layout: tuple[int, int, int]) -> None:
    """`place` and the order of the data loader are inverse to each other: row by row, what stands at a place is one row."""
    shares = Shares(*layout)
    in_order = [row for row in range(24) for _ in range(shares.group_size)]
    for process, own in enumerate(dealt(24, shares)):
        rows = [row for batch in own for row in batch]
        for number, row in enumerate(rows):
            place = shares.place(process, number)
            assert row == in_order[place] if place < len(in_order) else row < 0


def test_a_step_of_two_processes_holds_the_rows_of_one_process_step() -> None:
    """Two processes x 2 micro-batches of 2 against one process with 2 of 4, groups of 4."""
    one, two = dealt(6, Shares(1, 4, 4)), dealt(6, Shares(2, 2, 4))
    steps_of_one = [sorted(one[0][i] + one[0][i + 1]) for i in (0, 2, 4)]
    steps_of_two = [sorted(row for own in two for row in own[i] + own[i + 1]) for i in (0, 2, 4)]
    assert steps_of_one == steps_of_two


def test_one_process_has_no_fillers() -> None:
    assert dealt(5, Shares(1, 4)) == [[[0, 1, 2, 3], [4]]]


def test_fillers_come_last_and_are_rows_of_the_data() -> None:
    """5 rows for 2 x 4 places: three fillers, marked, all on the second process."""
    first, second = dealt(5, Shares(2, 4))
    assert first == [[0, 1, 2, 3]] and second == [[4, ~0, ~1, ~2]]


def test_drop_last_leaves_no_filler() -> None:
    assert dealt(11, Shares(2, 4), drop_last=True) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_marked_rows_are_read_as_fillers() -> None:
    rows = SampledRows(datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]))
    assert len(rows) == 2
    read = rows.__getitems__([1, ~0])
    assert read == [{"prompt": "b"}, {"prompt": "a"}]
    assert [isinstance(row, Filler) for row in read] == [False, True]
    assert [isinstance(row, Filler) for row in pickle.loads(pickle.dumps(read))] == [False, True], (
        "lost on the way from a worker"
    )
    assert rows[0] == {"prompt": "a"} and not isinstance({"prompt": "a"}, Filler)


# ---- Seeds


def seeds(rows: list[dict[str, Any]], places: list[int], *stream: int) -> list[int | None]:
    return [row.seed for row in with_seeds(rows, places, *stream) if isinstance(row, Row)]


def test_a_seed_depends_on_stream_and_place_alone() -> None:
    rows = [{"prompt": "a"}] * 3
    here, later = seeds(rows, [0, 1, 5], 0, 7), seeds(rows, [0, 1, 2], 0, 8)
    assert len({*here, *later}) == 6
    assert seeds([{"prompt": "b"}], [5], 0, 7) == here[2:]


def test_a_filler_stays_one_when_it_gets_its_seed() -> None:
    seeded = with_seeds([Filler(prompt="a"), {"prompt": "b"}], [0, 1], 0)
    assert [isinstance(row, Filler) for row in seeded] == [True, False] and seeded[0] == {"prompt": "a"}


# ---- Streams


@pytest.mark.parametrize("conversational", [False, True])
def test_rows_of_a_stream_are_repeated_into_groups(conversational: bool) -> None:
    """In the order of the stream, every column along."""
    rows = [{"prompt": [{"role": "user", "content": str(i)}] if conversational else str(i), "answer": i} for i in range(3)]

    def generate() -> Iterator[dict[str, Any]]:
        yield from rows

    streams = (datasets.IterableDataset.from_generator(generate), datasets.Dataset.from_list(rows).to_iterable_dataset())
    for stream in streams:
        assert list(repeat_rows(stream, 2)) == [row for row in rows for _ in range(2)]  # type: ignore[arg-type]
        assert repeat_rows(stream, 1) is stream  # type: ignore[arg-type]
