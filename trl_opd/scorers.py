"""What is computed of tokens where a model's head is called: log-probs, and what else an objective needs.

A scorer gives tuples of (N,) values, from the head's input in chunks or, of a model whose head is not understood, from its
whole logits. Shapes: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from .dense import Comparison, compare_head, compare_logits
from .heads import Head, score_head, score_logits
from .linear_head import LogitRule, Policy, compute_dtype


class Scorer(Protocol):
    """One way to score tokens."""

    def under(self, rule: LogitRule) -> Scorer:
        """The same for a model that does this to what its head returns; else its logits are taken as they are."""
        ...

    def of_hidden(self, hidden_NH: Tensor, ids_N: Tensor, head: Head) -> tuple[Tensor, ...]:
        """The values of the ids, from the head's input."""
        ...

    def of_logits(self, logits_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, ...]:
        """The values of the ids, from the model's own logits."""
        ...


@dataclass(frozen=True)
class LogProbs:
    """Log-probs and entropies (zeros unless asked for)."""

    policy: Policy
    entropy: bool = False

    def under(self, rule: LogitRule) -> LogProbs:
        return replace(self, policy=replace(self.policy, rule=rule))

    def of_hidden(self, hidden_NH: Tensor, ids_N: Tensor, head: Head) -> tuple[Tensor, ...]:
        return score_head(hidden_NH, ids_N, head, self.policy, entropy=self.entropy)

    def of_logits(self, logits_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, ...]:
        return score_logits(logits_NV, ids_N, self.policy, entropy=self.entropy)


@dataclass(frozen=True)
class HiddenStates(LogProbs):
    """Log-probs; the head's input is kept, in the precision that the head multiplies in."""

    kept: list[Tensor] = field(default_factory=list)
    """(N, H) of each call."""

    def of_hidden(self, hidden_NH: Tensor, ids_N: Tensor, head: Head) -> tuple[Tensor, ...]:
        self.kept.append(hidden_NH if head.weight is None else hidden_NH.to(compute_dtype(head.weight)))
        return super().of_hidden(hidden_NH, ids_N, head)


@dataclass(frozen=True)
class Divergences:
    """Log-probs, entropies and divergences from teachers, each of which knows some of the tokens."""

    policy: Policy
    parts: Sequence[tuple[Tensor, Comparison]]
    """(n,) numbers of tokens and what these are compared with; each of the N tokens is in one part."""

    def under(self, rule: LogitRule) -> Divergences:
        return replace(self, policy=replace(self.policy, rule=rule))

    def of_hidden(self, hidden_NH: Tensor, ids_N: Tensor, head: Head) -> tuple[Tensor, ...]:
        found = [compare_head(hidden_NH[own], ids_N[own], head, self.policy, comparison) for own, comparison in self.parts]
        return self._joined(found)

    def of_logits(self, logits_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, ...]:
        return self._joined([compare_logits(logits_NV[own], ids_N[own], self.policy, part) for own, part in self.parts])

    def _joined(self, found: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
        back = torch.cat([own for own, _ in self.parts]).argsort()
        return tuple(torch.cat(values)[back] for values in zip(*found, strict=True))
