"""Which distribution a head's output stands for, and a linear head: its logits and its gradients, some rows at a time.

Shapes: N tokens to score, H hidden, V rows of the head, C tokens of a chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class LogitRule:
    """What a model does to what its head returns, in the precision of that: multiply, divide or cap, or nothing."""

    times: float = 1.0
    over: float = 1.0
    cap: float | None = None
    """c in c · tanh(logit / c)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's own logits."""
        if self.times != 1:
            logits = logits * self.times
        if self.over != 1:
            logits = logits / self.over
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the model's own logits in what the head returned, at the former; in fp32 or better."""
        slope = self.times / self.over
        return slope if self.cap is None else slope * (1 - (logits / self.cap).square())


@dataclass(frozen=True)
class Policy:
    """Which distribution a head's output stands for: that of its first `vocab_size` ids (None: all) at a temperature."""

    temperature: float = 1.0
    vocab_size: int | None = None
    rule: LogitRule = LogitRule()

    def logits(self, head_logits: Tensor) -> Tensor:
        """(..., V) the logits the policy is the softmax of, in fp32 or better."""
        logits = self.rule(head_logits[..., : self.vocab_size])
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature


@dataclass(frozen=True)
class LinearHead:
    """The rows of a linear head that the policy ranges over, in the precision they are multiplied in."""

    weight: Tensor
    bias: Tensor | None
    policy: Policy
    precise: torch.dtype
    """Of all that follows the logits."""

    @classmethod
    def computing(cls, weight_VH: Tensor, bias_V: Tensor | None, policy: Policy, dtype: torch.dtype) -> LinearHead:
        rows = slice(policy.vocab_size)
        bias = None if bias_V is None else bias_V[rows].to(dtype)
        return cls(weight_VH[rows].to(dtype), bias, policy, torch.promote_types(dtype, torch.float32))

    def as_written(self, hidden: Tensor) -> AbstractContextManager[Any]:
        """Inside, precisions are those that are written here; autocast would convert the weight anew for each chunk."""
        return torch.autocast(hidden.device.type, enabled=False)

    def logits(self, hidden_CH: Tensor) -> tuple[Tensor, Tensor | float]:
        """The policy's logits, which are the caller's to overwrite, and their derivative in what the head returned."""
        rule, temperature = self.policy.rule, self.policy.temperature
        logits_CV = rule(F.linear(hidden_CH.to(self.weight.dtype), self.weight, self.bias)).to(self.precise)
        slope = rule.slope(logits_CV) / temperature
        return logits_CV if temperature == 1 else logits_CV.div_(temperature), slope


class HeadGrads:
    """Gradients in a linear head's input, weight and bias, as far as they are needed, added up chunk by chunk.

    Args:
        head: As it was computed with.
        hidden_NH: Its input.
        weight_VH: Its own weight.
        bias_V: Its own bias.
        needed: Of which of these three a gradient is wanted; what follows is not looked at.
    """

    def __init__(
        self, head: LinearHead, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self.head, self.given = head, (hidden_NH, weight_VH, bias_V)
        self.hidden_NH = torch.empty_like(hidden_NH) if needed[0] else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=head.precise) if needed[1] else None
        self.bias_V = torch.zeros_like(bias_V, dtype=head.precise) if needed[2] and bias_V is not None else None

    def add(self, rows: slice, slopes_CV: Tensor) -> None:
        """Those of some rows, by the loss's derivative in what the head returned there."""
        hidden_NH, size = self.given[0], len(self.head.weight)
        if self.bias_V is not None:
            self.bias_V[:size] += slopes_CV.sum(dim=0)
        rounded_CV = slopes_CV.to(self.head.weight.dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[rows] = (rounded_CV @ self.head.weight).to(hidden_NH.dtype)
        if self.weight_VH is not None:
            _add_product_(self.weight_VH[:size], slopes_CV, rounded_CV, hidden_NH[rows].to(self.head.weight.dtype))

    def found(self) -> list[Tensor | None]:
        """All three, each in the precision of what it belongs to."""
        pairs = zip((self.hidden_NH, self.weight_VH, self.bias_V), self.given, strict=True)
        return [None if grad is None or own is None else grad.to(own.dtype) for grad, own in pairs]


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What `nn.Linear` would multiply in here: autocast leaves float64 alone."""
    device = weight.device.type
    autocast = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


def _add_product_(total_VH: Tensor, slopes_CV: Tensor, rounded_CV: Tensor, hidden_CH: Tensor) -> None:
    """Adds slopes^T hidden without rounding it first: small terms would be lost, chunk after chunk."""
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total_VH, rounded_CV.T, hidden_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(slopes_CV.T, hidden_CH.to(total_VH.dtype))
