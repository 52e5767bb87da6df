"""Policy losses over sampled tokens. Pure; imports torch only.

How this differs from the textbook: there is no entropy or reference-model term (the teacher is the reference, inside the
advantage), and the mean is taken over the tokens of the whole optimizer step, whose number is passed in, so that the
gradient does not depend on how the step was cut into micro-batches or processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stats = dict[str, tuple[Tensor, Tensor]]

LOSS_FN_DEFAULTS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
REDUCTIONS = ("token_mean", "sequence_mean", "sum")


def policy_loss(
    logps: Tensor,
    sampled_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_fn: str = "importance_sampling",
    loss_fn_config: dict[str, Any] | None = None,
    reduction: str = "token_mean",
    num_items: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """The policy-gradient loss of one micro-batch, with `r = exp(logp - sampled_logp)`.

    | loss_fn | per-token loss | loss_fn_config |
    |---|---|---|
    | importance_sampling | -r·A | |
    | ppo | -min(r·A, clip(r, low, high)·A) | clip_low_threshold 0.8, clip_high_threshold 1.2 |
    | cispo | -sg[clip(r, low, high)]·logp·A | clip_low_threshold 0.0, clip_high_threshold 4.0 |
    | dro | -(logp·A - ½·beta·(logp - sampled_logp)²) | beta 0.05 |

    Args:
        logps: (B, T), nats, log-probabilities under the policy being trained; gradients flow through these only.
        sampled_logps: (B, T), nats, under the policy that sampled.
        advantages: (B, T), as `kl_advantages` returns them.
        mask: (B, T), 1 or True on action tokens. Nothing off the mask reaches the loss, its gradient or the stats.
        loss_fn: A row of the table.
        loss_fn_config: Overrides of that row's settings; `clip_*_threshold` are bounds of the ratio itself.
        reduction: "token_mean" (sum over action tokens ÷ `num_items`), "sequence_mean" (each sequence's token mean, summed,
            ÷ `num_items`) or "sum".
        num_items: What the mean divides by: the number of action tokens ("token_mean") or of sequences that have any
            ("sequence_mean") in the whole optimizer step. None counts those of this call. Ignored by "sum".

    Returns:
        The scalar loss, and sums for metrics as `{name: (sum, count)}` over the action tokens: "ratio/mean", "ratio/square",
        "sampler_kl/v1" (sampled - current log-prob), "sampler_kl/v2" (half its square) and, where the loss clips,
        "clip_fraction".

    Raises:
        ValueError: For an unknown loss, setting or reduction, or tensors of different shapes.

    Source: Tinker's losses of the same names; PPO (arXiv:1707.06347), CISPO (arXiv:2506.13585), DRO (arXiv:2405.19107).
    """
    _check_shapes(logps=logps, sampled_logps=sampled_logps, advantages=advantages, mask=mask)
    config = loss_settings(loss_fn, loss_fn_config)
    mask_BT, zero = mask.bool(), logps.new_zeros(())
    logps = torch.where(mask_BT, logps, zero)
    log_ratio_BT = logps - torch.where(mask_BT, sampled_logps.detach(), zero)
    advantages = torch.where(mask_BT, advantages.detach(), zero)

    losses_BT, clipped_BT = _LOSSES[loss_fn](logps, log_ratio_BT, advantages, **config)
    loss = reduce_loss(losses_BT, mask_BT, reduction, num_items)

    count = mask_BT.sum()
    with torch.no_grad():
        ratio_BT = torch.where(mask_BT, log_ratio_BT.exp(), zero)
        sums = {
            "ratio/mean": ratio_BT.sum(),
            "ratio/square": ratio_BT.square().sum(),
            "sampler_kl/v1": -log_ratio_BT.sum(),
            "sampler_kl/v2": log_ratio_BT.square().sum() / 2,
        }
        if clipped_BT is not None:
            sums["clip_fraction"] = (clipped_BT & mask_BT).sum()
    return loss, {name: (total, count) for name, total in sums.items()}


def loss_settings(loss_fn: str, overrides: dict[str, Any] | None) -> dict[str, float]:
    """The settings of `loss_fn` with `overrides` put over its defaults; an unknown name lists the valid ones."""
    if loss_fn not in LOSS_FN_DEFAULTS:
        raise ValueError(f"loss_fn is '{loss_fn}', but the known losses are {', '.join(LOSS_FN_DEFAULTS)}.")
    defaults = LOSS_FN_DEFAULTS[loss_fn]
    if unknown := sorted(set(overrides or {}) - set(defaults)):
        valid = ", ".join(defaults) or "none at all"
        raise ValueError(f"loss_fn_config has {unknown}, but the settings of loss_fn '{loss_fn}' are: {valid}.")
    return {**defaults, **(overrides or {})}


def count_items(mask: Tensor, reduction: str) -> Tensor:
    """What `reduction` divides by on this mask: action tokens, sequences that have any, or 1; a 0-d integer tensor."""
    mask_BT = mask.bool()
    if reduction == "token_mean":
        return mask_BT.sum()
    if reduction == "sequence_mean":
        return mask_BT.any(dim=1).sum()
    if reduction == "sum":
        return mask_BT.new_ones((), dtype=torch.long)
    raise ValueError(f"reduction is '{reduction}', but the known ones are {', '.join(REDUCTIONS)}.")


def reduce_loss(losses_BT: Tensor, mask_BT: Tensor, reduction: str, num_items: Tensor | float | None) -> Tensor:
    """Per-token losses (B, T), 0 off the mask, to the scalar that `policy_loss` says."""
    own_items = count_items(mask_BT, reduction)
    if reduction == "sum":
        return losses_BT.sum()
    if reduction == "sequence_mean":
        losses_BT = losses_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    items = torch.as_tensor(own_items if num_items is None else num_items, device=losses_BT.device)
    return losses_BT.sum() / items.clamp(min=1)  # no action token at all: 0 / 1, a finite zero


def _importance_sampling(logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, None]:
    return -log_ratio.exp() * advantages, None


def _ppo(
    logps: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> tuple[Tensor, Tensor]:
    ratio = log_ratio.exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(clip_low_threshold, clip_high_threshold) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped


def _cispo(
    logps: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> tuple[Tensor, Tensor]:
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -weight * logps * advantages, weight != ratio


def _dro(logps: Tensor, log_ratio: Tensor, advantages: Tensor, beta: float) -> tuple[Tensor, None]:
    return -(logps * advantages - 0.5 * beta * log_ratio.square()), None


_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"policy_loss needs tensors of one shape (B, T), got {found}.")
