"""From hidden states of student and teacher to their divergence at each token, without a (tokens x vocabulary) tensor.

`compare_logits`, `compare_hidden` and `compare_linear` are `score_logits`, `score_hidden` and `score_linear` of `heads.py`
with a teacher beside them: they return log-probs, entropies and, as a third, the divergence.

Shapes: N tokens, H hidden, V rows of the head, C tokens of a chunk.

A frozen linear head, as under LoRA, is multiplied twice (three times where log-probs need a gradient, too), the teacher's
once: a chunk's logits of both give the derivative in the hidden state, which is kept, as large as the hidden states. A trained
head computes each chunk again in the backward pass, the teacher's logits too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .divergence import Compared, Divergence, compare_
from .heads import CHUNK_ELEMENTS, Head, chunks
from .linear_head import HeadGrads, LinearHead, Policy, compute_dtype

Scores = tuple[Tensor, Tensor, Tensor]
"""(N,) each: log-prob of the id, entropy (without gradient), divergence."""


@dataclass(frozen=True)
class TeacherView:
    """What a teacher thinks of N tokens: its hidden states before each, and the way from them to its policy's logits."""

    hidden: Tensor
    """(N, its own width); no gradient goes there."""
    logits_of: Callable[[Tensor], Tensor]
    """Hidden states row by row -> logits of the policy, the caller's to overwrite."""

    @classmethod
    def linear(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy, dtype: torch.dtype | None = None
    ) -> TeacherView:
        """Of a linear head, multiplied in `dtype` (None: that of its weight) whatever autocast says, as when it scored."""
        head = LinearHead.computing(weight.detach(), bias, policy, dtype or weight.dtype)
        return cls(hidden.detach(), lambda hidden_CH: head.logits(hidden_CH)[0])

    @classmethod
    def of_head(cls, hidden: Tensor, head: Callable[[Tensor], Tensor], policy: Policy) -> TeacherView:
        """Of any head. Of a model whose whole logits are needed: these for `hidden`, and a head that returns them."""
        return cls(hidden.detach(), lambda hidden_CH: policy.logits(head(hidden_CH)))

    def __getitem__(self, rows: slice | Tensor) -> TeacherView:
        """What it thinks of some of the tokens."""
        return replace(self, hidden=self.hidden[rows])

    @torch.no_grad()
    def logits(self) -> Tensor:
        """(N, V) of its policy, to overwrite."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return self.logits_of(self.hidden)


@dataclass(frozen=True)
class Comparison:
    """What N tokens of the student are compared with, and what is wanted of it.

    Args:
        teacher: Its view of the same N tokens; its policy ranges over the same ids as the student's.
        divergence: Of the two.
        entropy: Whether to compute the student's.
        policy_gradient: Whether log-probs are differentiable; they cost a product with the head more, and as much memory
            as the hidden states. Without it they have no gradient.
        chunk_elements: Logits of both that may exist at once; a chunk's work takes about three times that.
    """

    teacher: TeacherView
    divergence: Divergence
    entropy: bool = False
    policy_gradient: bool = True
    chunk_elements: int = CHUNK_ELEMENTS

    def __getitem__(self, rows: slice | Tensor) -> Comparison:
        return replace(self, teacher=self.teacher[rows])

    def width(self) -> int:
        """Number of ids the teacher's policy ranges over."""
        return self.teacher[:0].logits().shape[-1]

    def of_(self, logits_CV: Tensor, ids_C: Tensor, rows: slice) -> Compared:
        """With the student's logits at `rows`, which it overwrites."""
        teacher_CV = self.teacher[rows].logits().to(logits_CV.dtype)
        wanted: dict[str, bool] = {"entropy": self.entropy, "logp_slopes": self.policy_gradient}
        return compare_(logits_CV, teacher_CV, ids_C, self.divergence, **wanted)


def compare_head(hidden_NH: Tensor, ids_N: Tensor, head: Head, policy: Policy, comparison: Comparison) -> Scores:
    """`compare_logits` of what the head returns, in chunks."""
    if head.weight is None:
        return compare_hidden(hidden_NH, ids_N, head.function, policy, comparison)
    return compare_linear(hidden_NH, ids_N, head.weight, head.bias, policy, comparison)


def compare_logits(logits_NV: Tensor, ids_N: Tensor, policy: Policy, comparison: Comparison) -> Scores:
    """Log-probs, entropies and divergences from the student's whole logits, differentiable in them."""
    parts: list[Scores] = []
    elements = comparison.chunk_elements
    for rows in chunks(len(ids_N), logits_NV.shape[-1] + comparison.width(), elements, at_least_one=True):
        parts.append(_Compare.apply(policy.logits(logits_NV[rows]), ids_N[rows], comparison[rows]))
    return _joined(parts)


def compare_hidden(
    hidden_NH: Tensor, ids_N: Tensor, head: Callable[[Tensor], Tensor], policy: Policy, comparison: Comparison
) -> Scores:
    """`compare_logits` of `head(hidden_NH)`, which is computed chunk by chunk, and again in the backward pass."""

    def compare(hidden_CH: Tensor, ids_C: Tensor, part: Comparison) -> Scores:
        return compare_logits(head(hidden_CH), ids_C, policy, part)

    with torch.no_grad():
        size = head(hidden_NH[:0]).shape[-1] + comparison.width()
    parts: list[Any] = []
    for rows in chunks(len(ids_N), size, comparison.chunk_elements, at_least_one=True):
        inputs = hidden_NH[rows], ids_N[rows], comparison[rows]
        parts.append(checkpoint(compare, *inputs, use_reentrant=False) if torch.is_grad_enabled() else compare(*inputs))
    return _joined(parts)


def compare_linear(
    hidden_NH: Tensor, ids_N: Tensor, weight_VH: Tensor, bias_V: Tensor | None, policy: Policy, comparison: Comparison
) -> Scores:
    """`compare_logits` of a linear head, in chunks, without autograd's help: less memory and time than `compare_hidden`.

    Args:
        hidden_NH: The head's input at each token.
        ids_N: The sampled token at each.
        weight_VH: The head's.
        bias_V: The head's, if it has one.
        policy: What its output stands for.
        comparison: With which teacher, and how.

    Returns:
        Nats, fp32 or better, (N,) each: log-probs of the ids, entropies (no gradient; zeros unless asked for), divergences.
        A divergence may be infinite, see `check_divergence`; its gradient is then zero.
    """
    own = (hidden_NH, weight_VH, *([] if bias_V is None else [bias_V]))
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in own)
    return _CompareLinear.apply(hidden_NH, weight_VH, bias_V, ids_N, _Settings(policy, comparison, differentiable))


def _joined(parts: list[Scores]) -> Scores:
    logps, entropies, divergences = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies), torch.cat(divergences)


class _Compare(torch.autograd.Function):
    """The student's policy's logits -> log-probs, entropies, divergences."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, ids_C: Tensor, comparison: Comparison) -> Scores:
        found = comparison.of_(logits_CV.clone(), ids_C, slice(None))
        ctx.save_for_backward(*found.slopes)
        return _returned(ctx, found.logps_C, found.entropy_C, found.divergence_C, comparison)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logps_grad_C: Tensor, _: Tensor, divergence_grad_C: Tensor) -> tuple[Tensor | None, ...]:
        return _weighted(ctx.saved_tensors, divergence_grad_C, logps_grad_C), None, None


@dataclass(frozen=True)
class _Settings:
    policy: Policy
    comparison: Comparison
    differentiable: bool


class _CompareLinear(torch.autograd.Function):
    """(hidden, weight, bias) -> log-probs, entropies, divergences."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_N: Tensor, settings: _Settings
    ) -> Scores:
        comparison = settings.comparison
        trained = settings.differentiable and any(ctx.needs_input_grad[1:3])
        keep = settings.differentiable and not trained
        now = comparison if keep else replace(comparison, policy_gradient=False)
        head = LinearHead.computing(weight_VH, bias_V, settings.policy, compute_dtype(weight_VH))
        logps_N, entropy_N, divergence_N = (hidden_NH.new_zeros(len(ids_N), dtype=head.precise) for _ in range(3))
        kept = [torch.empty_like(hidden_NH) for _ in range(1 + comparison.policy_gradient)] if keep else []
        with head.as_written(hidden_NH):
            for rows in chunks(len(ids_N), len(head.weight) + comparison.width(), comparison.chunk_elements):
                logits_CV, slope = head.logits(hidden_NH[rows])
                found = now.of_(logits_CV, ids_N[rows], rows)
                del logits_CV
                logps_N[rows], entropy_N[rows], divergence_N[rows] = found.logps_C, found.entropy_C, found.divergence_C
                for kept_NH, slopes_CV in zip(kept, found.slopes if keep else [], strict=True):
                    rounded_CV = slopes_CV.mul_(slope).to(head.weight.dtype)
                    kept_NH[rows] = (rounded_CV @ head.weight).to(hidden_NH.dtype)
                    del slopes_CV, rounded_CV
                del found  # before the next chunk is made
        ctx.settings, ctx.compute_dtype, ctx.trained = settings, head.weight.dtype, trained
        ctx.save_for_backward(*((hidden_NH, weight_VH, bias_V, ids_N) if trained else kept))
        return _returned(ctx, logps_N, entropy_N, divergence_N, comparison)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logps_grad_N: Tensor, _: Tensor, divergence_grad_N: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.trained:
            return _weighted(ctx.saved_tensors, divergence_grad_N, logps_grad_N), *[None] * 4
        hidden_NH, weight_VH, bias_V, ids_N = ctx.saved_tensors
        comparison = replace(ctx.settings.comparison, entropy=False)
        head = LinearHead.computing(weight_VH, bias_V, ctx.settings.policy, ctx.compute_dtype)
        grads = HeadGrads(head, hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        with head.as_written(hidden_NH):
            for rows in chunks(len(ids_N), len(head.weight) + comparison.width(), comparison.chunk_elements):
                logits_CV, slope = head.logits(hidden_NH[rows])
                slopes = comparison.of_(logits_CV, ids_N[rows], rows).slopes
                del logits_CV
                slopes_CV = _weighted_(slopes, divergence_grad_N[rows], logps_grad_N[rows]).mul_(slope)
                del slopes
                grads.add(rows, slopes_CV)
                del slopes_CV
        return *grads.found(), *[None] * 2


def _returned(ctx: Any, logps_C: Tensor, entropy_C: Tensor, divergence_C: Tensor, comparison: Comparison) -> Scores:
    """Says which of them have a gradient."""
    ctx.mark_non_differentiable(entropy_C, *([] if comparison.policy_gradient else [logps_C]))
    return logps_C, entropy_C, divergence_C


def _weighted(slopes: tuple[Tensor, ...], divergence_grad_C: Tensor, logps_grad_C: Tensor) -> Tensor:
    """The gradient by derivatives that are kept: they stay as they are."""
    total = slopes[0] * divergence_grad_C[:, None]
    for slopes_CK in slopes[1:]:
        total.addcmul_(slopes_CK, logps_grad_C[:, None])
    return total.to(slopes[0].dtype)


def _weighted_(slopes: list[Tensor], divergence_grad_C: Tensor, logps_grad_C: Tensor) -> Tensor:
    """`_weighted` in the first one's memory."""
    total = slopes[0].mul_(divergence_grad_C[:, None])
    for slopes_CK in slopes[1:]:
        total.addcmul_(slopes_CK, logps_grad_C[:, None])
    return total
