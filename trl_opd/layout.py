"""How sequences stand in the rows of a forward pass: no padding that can be helped, and no prompt twice.

Shapes: B sequences, T tokens of the caller's tensors; R rows, L tokens of a forward pass; N tokens to score.

How this differs from the usual padded batch:
1. Rows are moved flush left. A causal model then gives every row the values it gives that row alone, whatever its positions
   are (rotary, learned, ALiBi, a recurrent state), since padding comes after all that is scored.
2. Sequences of like lengths share a forward pass, and those of which no token is scored are left out.
3. Sequences that begin alike, as the completions of a group do, stand in one row: what they share, then the rest of each,
   which sees itself and what is shared only (a mask of the row's own, position ids that start again). The shared tokens are
   computed, and in the backward pass differentiated, once. Only for models that `prompt_sharing.py` has found to take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

LONGEST_SHARED_ROW = 8192
"""Tokens: a row of its own mask takes the square of its length in memory."""
PASS_COST = {"cpu": 32, "cuda": 512}
"""What a forward pass costs beside its tokens, in tokens: layers are called one by one, weights are read (or gathered)."""


@dataclass(frozen=True)
class Sharing:
    """What a model allows of sequences that share a row."""

    longest: float = inf
    """Most tokens of a sequence, its shared part included (a sliding window is left out of the row's mask)."""
    equal_length: float = inf
    """Tokens of a row at which attention costs as much as all else."""
    dtype: torch.dtype | None = None
    """Of a mask that is added to the scores of attention; None: the mask says True where it may look."""


@dataclass(frozen=True)
class Row:
    """A row of a forward pass: one sequence, or several after what they share."""

    members: tuple[int, ...]
    """Numbers of the sequences."""
    shared: int
    """Tokens that all of them begin with; of a single one, any number."""
    width: int

    def cost(self, equal_length: float) -> float:
        """In tokens of a short row."""
        return self.width * (1 + self.width / equal_length)


def pass_limit(attention_mask_BT: Tensor, batch_size: int, max_tokens: int | None) -> int:
    """Most tokens of a forward pass: `max_tokens`, or those of `batch_size` times the longest sequence."""
    return batch_size * int(attention_mask_BT.sum(dim=1).max()) if max_tokens is None else max_tokens


def plan_passes(
    ids_BT: Tensor, attention_mask_BT: Tensor, wanted_BT: Tensor, sharing: Sharing | None, max_tokens: float = inf
) -> list[list[tuple[int, ...]]]:
    """Which sequences to put into each row of each forward pass: numbers of those that have a token to score, each once.

    Args:
        ids_BT: Token ids.
        attention_mask_BT: True on real tokens.
        wanted_BT: True on the tokens to score.
        sharing: What the model allows; None: every sequence has a row of its own.
        max_tokens: Most tokens of a pass, padding included; a sequence that is longer has a pass of its own.

    Returns:
        At least one pass; the only one is empty if there is nothing to score. Of several in a row, all begin alike.
    """
    on_cpu = ids_BT.cpu(), attention_mask_BT.cpu().bool(), wanted_BT.cpu().bool()
    sequences, equal_length = _Sequences.of(*on_cpu), inf if sharing is None else sharing.equal_length
    pass_cost = PASS_COST["cpu" if ids_BT.device.type == "cpu" else "cuda"]
    # apart: a mask for each pair of tokens is that of a whole pass, and would take the window off the long ones
    long, short = sequences.longer_than(inf if sharing is None else sharing.longest)
    passes = _passes(long.rows(None), max_tokens, equal_length, pass_cost)
    return passes + _passes(short.rows(sharing, max_tokens), max_tokens, equal_length, pass_cost) or [[]]


def _passes(rows: list[Row], max_tokens: float, equal_length: float, pass_cost: float) -> list[list[tuple[int, ...]]]:
    """The rows in the passes in which they cost least."""
    rows = sorted(rows, key=lambda row: (-row.width, row.members))
    # best[i]: the least cost of the rows from i on, and where the pass that begins with row i ends
    best: list[tuple[float, int]] = [(0.0, len(rows))] * (len(rows) + 1)
    for start in reversed(range(len(rows))):
        found = (inf, start + 1)
        for end in range(start + 1, len(rows) + 1):
            if end > start + 1 and (end - start) * rows[start].width > max_tokens:
                break
            cost = pass_cost + (end - start) * rows[start].cost(equal_length) + best[end][0]
            found = min(found, (cost, end))
        best[start] = found
    passes, start = [], 0
    while start < len(rows):
        passes.append([row.members for row in rows[start : best[start][1]]])
        start = best[start][1]
    return passes


@dataclass(frozen=True)
class _Sequences:
    """What their rows depend on."""

    ids_BT: Tensor
    real_BT: Tensor
    lengths: list[int]
    """Without padding."""
    firsts: list[int | None]
    """Tokens before the first that is scored; None if there is none to score."""

    @classmethod
    def of(cls, ids_BT: Tensor, real_BT: Tensor, wanted_BT: Tensor) -> _Sequences:
        wanted_BT = real_BT & wanted_BT
        before_BT = real_BT.cumsum(dim=1) - real_BT.int()
        first_B1 = wanted_BT.int().argmax(dim=1, keepdim=True)
        pairs = zip(before_BT.gather(1, first_B1)[:, 0].tolist(), wanted_BT.any(dim=1).tolist(), strict=True)
        return cls(ids_BT, real_BT, real_BT.sum(dim=1).tolist(), [first if scored else None for first, scored in pairs])

    def longer_than(self, tokens: float) -> tuple[_Sequences, _Sequences]:
        """The same, with nothing to score but in those of more tokens; and in the others."""
        pairs = list(zip(self.lengths, self.firsts, strict=True))
        long = [first if length > tokens else None for length, first in pairs]
        return replace(self, firsts=long), replace(self, firsts=[None if n > tokens else first for n, first in pairs])

    def row(self, members: Sequence[int]) -> Row:
        """One for these, which begin alike."""
        shared = self.firsts[members[0]] or 0
        return Row(tuple(members), shared, shared + sum(self.lengths[number] - shared for number in members))

    def rows(self, sharing: Sharing | None, max_tokens: float = inf) -> list[Row]:
        """Those in which the sequences that have a token to score cost least."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, first in enumerate(self.firsts):
            if first is not None:
                prompt = self.ids_BT[number][self.real_BT[number]][:first].tolist() if sharing else [number]
                groups.setdefault(tuple(prompt), []).append(number)
        rows: list[Row] = []
        for members in groups.values():
            alone = [self.row([number]) for number in members]
            size = 1 if sharing is None else _sequences_a_row(alone, sharing, max_tokens)
            rows += [self.row(members[start : start + size]) for start in range(0, len(members), size)]
        return rows


def _sequences_a_row(alone: Sequence[Row], sharing: Sharing, max_tokens: float) -> int:
    """How many of a group to put into a row, so that it costs least; given are the rows of each by itself."""
    shared, longest = alone[0].shared, max(row.width for row in alone)
    mean_rest = sum(row.width for row in alone) / len(alone) - shared
    limit = min(LONGEST_SHARED_ROW, max_tokens)
    costs = {
        count: ceil(len(alone) / count) * Row((), shared, ceil(shared + count * mean_rest)).cost(sharing.equal_length)
        for count in range(1, len(alone) + 1)
        if count == 1 or shared + count * (longest - shared) <= limit
    }
    return min(costs, key=lambda count: costs[count])


@dataclass(frozen=True)
class Layout:
    """The rows of one forward pass; what is found out about their tokens comes back in the shape of the caller's tensors."""

    ids_RL: Tensor
    mask: Tensor
    """(R, L), 0 on padding, in the type of the caller's; where sequences share a row, (R, 1, L, L) for each pair of tokens."""
    positions_RL: Tensor | None
    """Where sequences share a row."""
    sources: tuple[Tensor, Tensor]
    """(N,) rows and columns of the tokens after which those to score are predicted."""
    targets_N: Tensor
    """Ids of the tokens to score."""
    places: tuple[Tensor, Tensor]
    """(N,) their rows and columns in the caller's tensors."""
    shape: tuple[int, ...]
    """(B, T)."""

    @classmethod
    def of(
        cls,
        ids_BT: Tensor,
        attention_mask_BT: Tensor,
        wanted_BT: Tensor | None = None,
        sharing: Sharing | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> Layout:
        """One forward pass.

        Args:
            ids_BT: Token ids.
            attention_mask_BT: 1 on real tokens, 0 on padding, which may stand on either side.
            wanted_BT: 1 on the tokens to score; None for all real ones. A sequence's first token is never scored.
            sharing: What the model allows; None: every sequence has a row of its own.
            rows: The sequences of each row, as planned; by default all that have a token to score, as costs least.
        """
        device, dtype = ids_BT.device, attention_mask_BT.dtype
        ids_BT, real_BT = ids_BT.cpu(), attention_mask_BT.cpu().bool()
        wanted_BT = real_BT if wanted_BT is None else real_BT & wanted_BT.cpu().bool()
        wanted_BT = wanted_BT & (real_BT.cumsum(dim=1) > 1)
        sequences = _Sequences.of(ids_BT, real_BT, wanted_BT)
        if rows is None and sharing and sequences.longer_than(sharing.longest)[0].rows(None):
            sharing = None  # a mask for each pair of tokens would have no window
        laid = sequences.rows(sharing) if rows is None else [sequences.row(members) for members in rows]
        laid = laid or [Row((0,), 0, min(2, sequences.lengths[0]))]

        ids_RL = torch.zeros(len(laid), max(row.width for row in laid), dtype=torch.long)
        position_RL, owner_RL = torch.zeros_like(ids_RL), torch.full_like(ids_RL, -1)
        found: list[tuple[Tensor, ...]] = []  # of each sequence: rows, columns, ids and places of what is scored
        for number_of_row, row in enumerate(laid):
            start = row.shared
            for number in row.members:
                places_S = real_BT[number].nonzero().flatten()[: row.width]
                position_S = torch.arange(len(places_S))
                column_S = torch.where(position_S < row.shared, position_S, position_S - row.shared + start)
                ids_RL[number_of_row, column_S] = ids_BT[number, places_S]
                position_RL[number_of_row, column_S] = position_S
                owner_RL[number_of_row, column_S] = torch.where(position_S < row.shared, 0, number + 1)
                source_S = column_S - 1
                source_S[row.shared : row.shared + 1] = row.shared - 1  # whatever stands between
                scored_N = wanted_BT[number, places_S]
                row_N, number_N = (torch.full_like(position_S, n)[scored_N] for n in (number_of_row, number))
                found.append((row_N, source_S[scored_N], ids_RL[row_N, column_S[scored_N]], number_N, places_S[scored_N]))
                start += len(places_S) - row.shared

        rows_N, columns_N, targets_N, numbers_N, places_N = (torch.cat(parts).to(device) for parts in zip(*found, strict=True))
        together = any(len(row.members) > 1 for row in laid)
        return cls(
            ids_RL=ids_RL.to(device),
            mask=_pair_mask(owner_RL, sharing).to(device) if together and sharing else (owner_RL >= 0).to(device, dtype),
            positions_RL=position_RL.to(device) if together else None,
            sources=(rows_N, columns_N),
            targets_N=targets_N,
            places=(numbers_N, places_N),
            shape=tuple(ids_BT.shape),
        )

    def inputs(self) -> dict[str, Any]:
        """What the model is called with."""
        inputs = {"input_ids": self.ids_RL, "attention_mask": self.mask, "use_cache": False}
        return inputs if self.positions_RL is None else {**inputs, "position_ids": self.positions_RL}

    def moved_back(self, values_N: Tensor) -> Tensor:
        """(B, T): the values of the scored tokens at their places, 0 elsewhere."""
        return values_N.new_zeros(self.shape).index_put(self.places, values_N)


def _pair_mask(owner_RL: Tensor, sharing: Sharing) -> Tensor:
    """(R, 1, L, L): whether the token of a line may look at that of a column, by whose they are (0: all, -1: padding)."""
    of_looking, of_seen = owner_RL[:, :, None], owner_RL[:, None, :]
    mask_RLL = ((of_seen == 0) | (of_seen == of_looking)).tril()
    mask_RLL |= torch.eye(owner_RL.shape[1], dtype=torch.bool)  # padding sees itself: of nothing, a softmax is NaN
    if sharing.dtype is None:
        return mask_RLL[:, None]
    return torch.zeros(mask_RLL.shape, dtype=sharing.dtype).masked_fill(~mask_RLL, torch.finfo(sharing.dtype).min)[:, None]
