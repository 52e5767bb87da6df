"""The advantage of on-policy distillation: the per-token negative reverse KL. Pure; imports torch only.

How this differs from the textbook policy gradient:
1. There is no reward model, value function or baseline: the teacher's log-probability of the token the student sampled is
   the whole signal.
2. The KL term is not centred or whitened. At p = q it is zero on every token, not only on average.
3. `discount` is 0 by default: a token answers for its own KL. With 1 it answers for all that follows (the exact gradient
   of the sequence-level reverse KL, at about three times the variance).
"""

import torch
from torch import Tensor


def kl_advantages(
    sampled_logps: Tensor,
    teacher_logps: Tensor,
    mask: Tensor,
    *,
    coef: float = 1.0,
    discount: float = 0.0,
    clip: float | None = None,
    immediate: bool = True,
) -> Tensor:
    """Turns student and teacher log-probabilities of the sampled tokens into advantages.

    `d_t = s_t - log q_t` is the sampled ("k1") estimate of the reverse KL, `a_t = -coef * clamp(d_t, ±clip)` and
    `R_t = a_t + discount * R_next(t)`, where next(t) is the next *action* token of the row: prompt, tool-output and
    padding positions neither receive nor dilute anything.

    Args:
        sampled_logps: (B, T), nats, log-probability of each token under the policy that sampled it.
        teacher_logps: (B, T), nats, the teacher's log-probability of the same tokens.
        mask: (B, T), 1 or True on action tokens. Whatever the inputs hold elsewhere, NaN and -inf included, is ignored.
        coef: Weight of the KL term.
        discount: How much of the KL of later action tokens an action answers for, in [0, 1].
        clip: Bound on |d_t| in nats; None for no bound.
        immediate: Whether a token answers for its own KL; False where the loss has that exactly, over all next tokens: then
            `discount * R_next(t)` is left.

    Returns:
        (B, T) advantages, detached, exactly 0 off the mask.

    Source: Thinking Machines, "On-Policy Distillation" (2025).
    """
    mask_BT = mask.bool()
    kl_BT = reverse_kl(sampled_logps, teacher_logps, mask_BT)
    if clip is not None:
        kl_BT = kl_BT.clamp(-clip, clip)
    advantages_BT = -coef * kl_BT
    whole_BT = advantages_BT if discount == 0 else _discounted_sum(advantages_BT, mask_BT, discount)
    return whole_BT if immediate else whole_BT - advantages_BT


def reverse_kl(sampled_logps: Tensor, teacher_logps: Tensor, mask: Tensor) -> Tensor:
    """`d_t = s_t - log q_t` on action tokens and 0 elsewhere: (B, T), nats, detached."""
    mask_BT, zero = mask.bool(), sampled_logps.new_zeros(())
    return torch.where(mask_BT, sampled_logps.detach(), zero) - torch.where(mask_BT, teacher_logps.detach(), zero)


def _discounted_sum(values_BT: Tensor, mask_BT: Tensor, discount: float) -> Tensor:
    """`R_t = values_t + discount * R_next(t)` along the action tokens, right to left."""
    sums_BT = torch.zeros_like(values_BT)
    next_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        next_B = torch.where(mask_BT[:, t], values_BT[:, t] + discount * next_B, next_B)
        sums_BT[:, t] = torch.where(mask_BT[:, t], next_B, sums_BT[:, t])
    return sums_BT
