"""From hidden states to log-probs of given tokens, without a (tokens x vocabulary) tensor: some rows at a time.

Shapes: N tokens to score, H hidden, V rows of the head, C tokens of a chunk.

How this differs from the usual chunked loss:
1. A frozen head, as under LoRA, is multiplied twice in all: the chunk of logits that gives a log-prob also gives its gradient
   in the hidden state, which is kept, as large as the hidden states. A trained head computes each chunk but the
   first again in the backward pass and adds to one gradient of its weights in fp32.
2. Logits are rounded as the model would round them (the head's precision, or that of autocast) and are fp32 from there on;
   float64 stays float64. TRL's `ChunkedLogProbFunction`, which also knows caps and scales and gives entropies on a CPU, holds
   all in fp32 and multiplies by the head three times where two are enough; `benchmarks/heads.py` has it beside this.
3. Entropy has no gradient here: it is a figure to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .linear_head import HeadGrads, LinearHead, Policy, compute_dtype

CHUNK_ELEMENTS = 2**25
"""Logits that exist at once: 128 MiB in fp32; a chunk's work takes about three times that."""


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: by a function of each and, if that is linear, by what weights."""

    function: Callable[[Tensor], Tensor]
    weight: Tensor | None = None
    bias: Tensor | None = None


def score_head(hidden_NH: Tensor, ids_N: Tensor, head: Head, policy: Policy, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """`score_logits` of what the head returns, in chunks."""
    if head.weight is None:
        return score_hidden(hidden_NH, ids_N, head.function, policy, entropy=entropy)
    return score_linear(hidden_NH, ids_N, head.weight, head.bias, policy, entropy=entropy)


def score_logits(logits_NV: Tensor, ids_N: Tensor, policy: Policy, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-prob of each id, differentiable, and the entropy of each row (zeros unless asked for), from a head's output."""
    logits_NV = policy.logits(logits_NV)
    lse_N = logits_NV.logsumexp(dim=-1)
    logps_N = logits_NV.gather(-1, ids_N[:, None]).squeeze(-1) - lse_N
    entropy_N = torch.zeros_like(lse_N.detach())
    if entropy:
        with torch.no_grad():
            for rows in chunks(len(ids_N), logits_NV.shape[-1], CHUNK_ELEMENTS):
                logps_CV = logits_NV[rows] - lse_N[rows, None]
                # exp(-inf) * -inf is NaN where a logit is -inf; such a token adds nothing
                entropy_N[rows] = -row_dots(logps_CV.exp(), logps_CV.clamp_(min=torch.finfo(logps_CV.dtype).min))
    return logps_N, entropy_N


def score_hidden(
    hidden_NH: Tensor,
    ids_N: Tensor,
    head: Callable[[Tensor], Tensor],
    policy: Policy,
    *,
    entropy: bool,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """`score_logits` of `head(hidden_NH)`, which is computed chunk by chunk, and again in the backward pass.

    Args:
        hidden_NH: The head's input at each token.
        ids_N: The token to score at each.
        head: Any function of hidden states row by row, with parameters or not.
        policy: What its output stands for.
        entropy: Whether to compute it.
        chunk_elements: Logits that may exist at once.
    """

    def score(hidden_CH: Tensor, ids_C: Tensor) -> tuple[Tensor, Tensor]:
        return score_logits(head(hidden_CH), ids_C, policy, entropy=entropy)

    with torch.no_grad():
        num_rows = head(hidden_NH[:0]).shape[-1]
    parts: list[Any] = []
    for rows in chunks(
        len(ids_N), num_rows, chunk_elements, at_least_one=True
    ):  # so that no parameter of the head is left without gradient
        inputs = hidden_NH[rows], ids_N[rows]
        parts.append(checkpoint(score, *inputs, use_reentrant=False) if torch.is_grad_enabled() else score(*inputs))
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def score_linear(
    hidden_NH: Tensor,
    ids_N: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    policy: Policy,
    *,
    entropy: bool,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """`score_logits` of a linear head, in chunks, without autograd's help: less memory and time than `score_hidden`."""
    own = (hidden_NH, weight_VH, *([] if bias_V is None else [bias_V]))
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in own)
    settings = _Settings(policy, entropy, differentiable, chunk_elements)
    logps_N, entropy_N = _LinearLogps.apply(hidden_NH, weight_VH, bias_V, ids_N, settings)
    return logps_N, entropy_N


@dataclass(frozen=True)
class _Settings:
    policy: Policy
    entropy: bool
    differentiable: bool
    chunk_elements: int


class _LinearLogps(torch.autograd.Function):
    """(hidden, weight, bias) -> log-probs, entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        policy = settings.policy
        trained = settings.differentiable and any(ctx.needs_input_grad[1:3])
        head = LinearHead.computing(weight_VH, bias_V, policy, compute_dtype(weight_VH))
        logps_N, lse_N, entropy_N = (hidden_NH.new_zeros(len(ids_N), dtype=head.precise) for _ in range(3))
        slopes_NH = torch.empty_like(hidden_NH) if settings.differentiable and not trained else None
        kept: list[tuple[Tensor, float]] = []  # the first chunk's, one less to compute again
        with head.as_written(hidden_NH):
            for rows in chunks(len(ids_N), len(head.weight), settings.chunk_elements):
                logits_CV, slope = head.logits(hidden_NH[rows])
                largest_C1 = logits_CV.amax(dim=-1, keepdim=True)
                chosen_C = logits_CV.gather(-1, ids_N[rows, None]).squeeze(-1)
                probs_CV = torch.exp(logits_CV.sub_(largest_C1))
                sums_C = probs_CV.sum(dim=-1)
                lse_N[rows] = largest_C1.squeeze(-1) + sums_C.log()
                logps_N[rows] = chosen_C - lse_N[rows]
                if settings.entropy:
                    logits_CV.clamp_(min=torch.finfo(logits_CV.dtype).min)  # as in `score_logits`
                    entropy_N[rows] = sums_C.log() - row_dots(probs_CV, logits_CV) / sums_C
                del logits_CV
                if trained and rows.start == 0 and not isinstance(slope, Tensor):
                    kept.append((probs_CV.div_(sums_C[:, None]), slope))
                if slopes_NH is not None:
                    slopes_CV = _slopes_(probs_CV.div_(sums_C[:, None]), ids_N[rows], slope)
                    slopes_NH[rows] = (slopes_CV.to(head.weight.dtype) @ head.weight).to(hidden_NH.dtype)
        ctx.settings, ctx.compute_dtype, ctx.trained, ctx.kept = settings, head.weight.dtype, trained, kept
        if trained:
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, lse_N)
        else:
            ctx.save_for_backward(slopes_NH)
        ctx.mark_non_differentiable(entropy_N)
        return logps_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.trained:
            (slopes_NH,) = ctx.saved_tensors
            return (slopes_NH * grad_N[:, None]).to(slopes_NH.dtype), *[None] * 4
        hidden_NH, weight_VH, bias_V, ids_N, lse_N = ctx.saved_tensors
        settings = ctx.settings
        head = LinearHead.computing(weight_VH, bias_V, settings.policy, ctx.compute_dtype)
        grads = HeadGrads(head, hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        with head.as_written(hidden_NH):
            for rows in chunks(len(ids_N), len(head.weight), settings.chunk_elements):
                if rows.start == 0 and ctx.kept:
                    probs_CV, slope = ctx.kept.pop()  # to be overwritten: another backward pass computes it again
                else:
                    logits_CV, slope = head.logits(hidden_NH[rows])
                    probs_CV = logits_CV.sub_(lse_N[rows, None]).exp_()
                    del logits_CV
                slopes_CV = _slopes_(probs_CV, ids_N[rows], slope).mul_(grad_N[rows, None])
                grads.add(rows, slopes_CV)
                del probs_CV, slopes_CV  # before the next chunk is made
        return *grads.found(), *[None] * 2


class _Touch(torch.autograd.Function):
    """Zeros of `shape` that depend on `values`, to which they give a gradient of zero whatever the values are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.like = values.shape, values.dtype
        return values.new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype = ctx.like
        return grad.new_zeros(shape, dtype=dtype), None, None


def zeros_after(values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that autograd takes to be computed from `values`: their backward pass comes first, and adds nothing."""
    zeros: Tensor = _Touch.apply(values, shape, dtype)
    return zeros


def chunks(num_tokens: int, num_rows: int, elements: int, *, at_least_one: bool = False) -> Iterator[slice]:
    size = max(1, elements // max(1, num_rows))
    for start in range(0, max(num_tokens, at_least_one), size):
        yield slice(start, start + size)


def _slopes_(probs_CV: Tensor, ids_C: Tensor, slope: Tensor | float) -> Tensor:
    """In place: (1 at the token, else 0) - p, the log-prob's derivative in the policy's logits, times `slope`."""
    slopes_CV = probs_CV.neg_()
    slopes_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += 1
    return slopes_CV.mul_(slope)


def row_dots(one_NV: Tensor, other_NV: Tensor) -> Tensor:
    """(N,) sums of products, without the products."""
    return torch.bmm(one_NV[:, None, :], other_NV[:, :, None]).flatten()
