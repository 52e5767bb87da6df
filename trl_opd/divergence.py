"""How far two next-token distributions are apart, and the derivative in the student's logits. Pure; imports torch and `heads`.

Shapes: C tokens of a chunk, V ids that both distributions range over, K buckets of a distribution (all V ids, or some and the
rest). A name that ends in `_` overwrites what it is given, so that few (C, V) tensors exist at once.

How this differs from the usual code:
1. The value is never an advantage: it does not depend on the sampled token, so that its expected policy gradient is zero. It
   is a loss with a derivative, which is written out here and not left to autograd, which would keep what it went through.
2. The top k have a bucket for the rest beside them, with the rest's mass on both sides. A sum over the top k alone is no
   divergence: where student and teacher are equal it still has a gradient. The rest's mass is the sum of its own
   probabilities; 1 - sum(top k) would round it away.
3. A token that the one side gives no probability adds nothing to that side's mean, whatever the other says of it. One that
   only the other rules out (a logit of -inf) makes a one-sided divergence infinite, as it is; the derivative is then zero,
   never NaN, and `check_divergence` tells.
4. At equal logits every value and every derivative is exactly zero, in any precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import row_dots

GRANULARITIES = ("sampled", "topk", "full")
DIRECTIONS = ("reverse", "forward", "jsd")


@dataclass(frozen=True)
class Divergence:
    """Which divergence between student p and teacher q, over which buckets.

    | direction | per token |
    |---|---|
    | reverse | Σ p (log p − log q) |
    | forward | Σ q (log q − log p) |
    | jsd | beta Σ q (log q − log m) + (1 − beta) Σ p (log p − log m), with m = beta q + (1 − beta) p |

    beta runs as in TRL's GKD: towards 0 the divergence becomes like forward (÷ beta), towards 1 like reverse (÷ (1 − beta)).
    Source of jsd: arXiv:2306.13649, equation 1.
    """

    granularity: str = "full"
    """"full": a bucket for each id; "topk": one for each of the student's `top_k` likeliest, and one for all others."""
    direction: str = "reverse"
    beta: float = 0.5
    """In (0, 1); of jsd."""
    top_k: int = 32


@dataclass(frozen=True)
class Compared:
    """What `compare_` finds at C tokens."""

    logps_C: Tensor
    entropy_C: Tensor
    """Of the student; zeros unless asked for."""
    divergence_C: Tensor
    slopes: list[Tensor]
    """(C, V) derivatives in the student's logits: of the divergence and, if asked for, of the log-probs."""


def compare_(
    student_CV: Tensor, teacher_CV: Tensor, ids_C: Tensor, divergence: Divergence, *, entropy: bool, logp_slopes: bool
) -> Compared:
    """Log-probs of ids under the student, and how far it is from the teacher at each, from the logits of both."""
    assert student_CV.shape == teacher_CV.shape, f"{tuple(student_CV.shape)} and {tuple(teacher_CV.shape)} logits"
    chosen_C1 = student_CV.gather(-1, ids_C[:, None])
    whole = divergence.granularity == "full" or divergence.top_k >= student_CV.shape[-1]
    compare = _compare_whole_ if whole else _compare_top_k_
    probs_CV, lse_C1, divergence_C1, slopes_CV, entropy_C = compare(student_CV, teacher_CV, divergence, entropy, logp_slopes)
    slopes = [slopes_CV]
    if logp_slopes:
        logp_slopes_CV = probs_CV.neg_()
        logp_slopes_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += 1
        slopes.append(logp_slopes_CV)
    return Compared((chosen_C1 - lse_C1).squeeze(-1), entropy_C, divergence_C1.squeeze(-1), slopes)


def check_divergence(divergence_N: Tensor, direction: str) -> None:
    """Raises ValueError where a divergence is infinite or NaN: the loss would be, which Trainer leaves out of its logs."""
    bad_N = ~divergence_N.isfinite()
    if bad_N.any():
        who, whom = ("teacher", "student") if direction == "reverse" else ("student", "teacher")
        raise ValueError(
            f"The {direction} divergence from the teacher is not finite at {int(bad_N.sum())} of {len(bad_N)} tokens; the "
            f"first is {float(divergence_N[bad_N][0])}. NaN points to broken logits; inf means that the {who} rules out (a "
            f"logit of -inf) what the {whom} gives some probability. kl_direction='jsd' is bounded, and kl_granularity="
            "'sampled' with kl_clip bounds each token."
        )


# What both ways of comparing return: the student's probs and log-sum-exp, the divergence, its derivative, the entropy.
_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _compare_whole_(student_CV: Tensor, teacher_CV: Tensor, divergence: Divergence, entropy: bool, _: bool) -> _Parts:
    probs_CV, lse_C1 = _normalise_(student_CV)
    divergence_C1, slopes_CV = _FORMULAS[divergence.direction](student_CV, probs_CV, teacher_CV, divergence.beta)
    return probs_CV, lse_C1, divergence_C1, slopes_CV, _entropy_(student_CV, probs_CV, entropy)


def _compare_top_k_(student_CV: Tensor, teacher_CV: Tensor, divergence: Divergence, entropy: bool, keep_probs: bool) -> _Parts:
    """In two steps: buckets, and how the rest's mass is spread, which changes nothing in the divergence."""
    top = student_CV.topk(divergence.top_k)
    rest_probs_CV, student_CK = _bucket_(student_CV, top.values, top.indices)
    teacher_CK = _bucket_(teacher_CV, teacher_CV.gather(-1, top.indices), top.indices)[1]
    probs_CK, lse_C1 = _normalise_(student_CK)
    divergence_C1, slopes_CK = _FORMULAS[divergence.direction](student_CK, probs_CK, teacher_CK, divergence.beta)
    entropy_C = _entropy_(student_CK, probs_CK, entropy)
    entropy_C += probs_CK[:, -1] * _entropy_(student_CV, rest_probs_CV, entropy)
    # moving a logit of the rest moves the rest's mass by its share
    slopes_CV = rest_probs_CV.mul(slopes_CK[:, -1:]) if keep_probs else rest_probs_CV.mul_(slopes_CK[:, -1:])
    slopes_CV.scatter_(-1, top.indices, slopes_CK[:, :-1])
    if keep_probs:
        rest_probs_CV.mul_(probs_CK[:, -1:]).scatter_(-1, top.indices, probs_CK[:, :-1])
    return rest_probs_CV, lse_C1, divergence_C1, slopes_CV, entropy_C


def _bucket_(logits_CV: Tensor, top_Ck: Tensor, ids_Ck: Tensor) -> tuple[Tensor, Tensor]:
    """Probs of the rest among themselves (0 at `ids`), and logits of the buckets; leaves the log of the former."""
    rest_probs_CV, rest_C1 = _normalise_(logits_CV.scatter_(-1, ids_Ck, -torch.inf))
    return rest_probs_CV, torch.cat([top_Ck, rest_C1], dim=-1)


def _normalise_(logits_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves log-probs in `logits_CK`; returns probs and the log-sum-exp (C, 1), which is -inf where all is."""
    lowest = torch.finfo(logits_CK.dtype).min
    largest_C1 = logits_CK.amax(dim=-1, keepdim=True).clamp_(min=lowest)  # -inf less itself is NaN
    probs_CK = logits_CK.sub_(largest_C1).exp()
    sums_C1 = probs_CK.sum(dim=-1, keepdim=True)
    log_sums_C1 = sums_C1.log()
    logits_CK.sub_(log_sums_C1.clamp(min=lowest))
    return probs_CK.div_(sums_C1.clamp(min=torch.finfo(sums_C1.dtype).tiny)), largest_C1 + log_sums_C1


def _entropy_(logps_CK: Tensor, probs_CK: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return logps_CK.new_zeros(len(logps_CK))
    return -row_dots(probs_CK, logps_CK.clamp_(min=torch.finfo(logps_CK.dtype).min))  # a ruled-out token adds 0, not NaN


def _reverse_(logps_CK: Tensor, probs_CK: Tensor, teacher_CK: Tensor, _: float) -> tuple[Tensor, Tensor]:
    _normalise_(teacher_CK)
    ratios_CK = torch.sub(logps_CK, teacher_CK, out=teacher_CK).masked_fill_(probs_CK == 0, 0)
    terms_CK = ratios_CK.mul_(probs_CK)
    value_C1 = terms_CK.sum(dim=-1, keepdim=True)
    return value_C1, _zero_where_infinite_(terms_CK.addcmul_(probs_CK, value_C1, value=-1), value_C1)


def _forward_(logps_CK: Tensor, probs_CK: Tensor, teacher_CK: Tensor, _: float) -> tuple[Tensor, Tensor]:
    teacher_probs_CK, _lse = _normalise_(teacher_CK)
    terms_CK = teacher_CK.sub_(logps_CK).masked_fill_(teacher_probs_CK == 0, 0).mul_(teacher_probs_CK)
    value_C1 = terms_CK.sum(dim=-1, keepdim=True)
    return value_C1, _zero_where_infinite_(torch.sub(probs_CK, teacher_probs_CK, out=terms_CK), value_C1)


def _jsd_(logps_CK: Tensor, probs_CK: Tensor, teacher_CK: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """With w = log q - log p: log m is the larger of both plus log1p(c expm1(-|w|)), c the weight of the smaller."""
    teacher_probs_CK, _lse = _normalise_(teacher_CK)
    # both ruled out: equal; one of them: as far apart as numbers go
    w_CK = teacher_CK.sub_(logps_CK).nan_to_num_(nan=0)
    weights_CK = (w_CK > 0).to(w_CK.dtype).mul_(1 - 2 * beta).add_(beta)
    above_CK = w_CK.abs().neg_().expm1_().mul_(weights_CK).log1p_().neg_()
    del weights_CK
    teacher_terms_CK = w_CK.clamp(max=0).add_(above_CK).mul_(teacher_probs_CK)
    teacher_C1 = teacher_terms_CK.sum(dim=-1, keepdim=True)
    del teacher_terms_CK
    terms_CK = above_CK.sub_(w_CK.clamp_(min=0)).mul_(probs_CK)
    student_C1 = terms_CK.sum(dim=-1, keepdim=True)
    return beta * teacher_C1 + (1 - beta) * student_C1, terms_CK.addcmul_(probs_CK, student_C1, value=-1).mul_(1 - beta)


def _zero_where_infinite_(slopes_CK: Tensor, value_C1: Tensor) -> Tensor:
    return slopes_CK.masked_fill_(value_C1.isinf(), 0)


_FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "reverse": _reverse_,
    "forward": _forward_,
    "jsd": _jsd_,
}
