"""Finds a model's head and what the model does after it, and has the head give log-probs in place of logits.

The head stays where it is called, inside the forward pass of the wrapped model: what DDP, FSDP, autocast and hooks do around
it holds. Meanwhile its `forward` is another, which sees the hidden states, scores the wanted tokens in chunks (`heads.py`),
keeps what it found on the side and returns zeros of shape (R, L, 1) for the model to scale, cap and convert.

Shapes: R rows, L tokens, N tokens to score, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .checks import warn
from .heads import Head, zeros_after
from .layout import Layout
from .linear_head import LogitRule
from .models import eval_mode, unwrapped

FIELDS: dict[str, tuple[str, ...]] = {
    "times": ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling", "output_multiplier_scale"),
    "over": ("logits_scaling",),
    "cap": ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap"),
}
"""What configurations call the number in each kind of rule. The probe decides, so that a name may mean something else, too."""
PROBE_TOKENS = 8

_RULES: weakref.WeakKeyDictionary[nn.Module, dict[bool, LogitRule | None]] = weakref.WeakKeyDictionary()
"""What was found out about a model, called as it is and called compiled; None: whole logits are needed."""


def known_head(model: Any, ids_1L: Tensor) -> tuple[nn.Module, LogitRule] | None:
    """The model's head and what becomes of its output; None if log-probs have to come from the model's whole logits.

    At the first call for a model, these few tokens pass through it without gradient (on every process, where there are
    several), to compare its logits with what its head returned.
    """
    inner, compiled = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        return None
    head = inner.get_output_embeddings()
    rules = _RULES.setdefault(inner, {})
    if compiled not in rules:
        rule, reason = (None, "is compiled as a whole") if compiled else _probe(model, inner.config, head, ids_1L)
        rules[compiled] = rule
        if rule is None:
            warn(
                f"{type(inner).__name__} {reason}, so that log-probs are computed from all its logits at once. They are "
                "right, but take about 12 bytes for each token of a micro-batch and each id of the vocabulary; lower "
                "per_device_train_batch_size if memory is short."
            )
    rule = rules[compiled]
    return None if head is None or rule is None else (head, rule)


@contextmanager
def scoring(
    head: nn.Module, layout: Layout, score: Callable[[Tensor, Tensor, Head], tuple[Tensor, ...]]
) -> Iterator[list[tuple[Tensor, ...]]]:
    """Inside, `head` scores tokens in place of giving logits: once called, what `score` found is in the list.

    Args:
        head: Of the model that is called inside, once, on the tokens of `layout`.
        layout: Which N tokens to score, and after which.
        score: Given the (N, H) hidden states before them, their ids and the head, it returns values (N,) of one backward pass.
    """
    own_forward, shape = head.forward, layout.ids_RL.shape
    linear = "forward" not in vars(head) and is_linear(head)
    found: list[tuple[Tensor, ...]] = []

    def forward(hidden_RLH: Tensor) -> Tensor:
        assert hidden_RLH.shape[:-1] == shape, f"{tuple(hidden_RLH.shape)} hidden states for {tuple(shape)} tokens"
        own = Head(own_forward)
        if linear and type(weight := cast(nn.Linear, head).weight) in (Tensor, nn.Parameter):
            own = Head(own_forward, weight, cast(nn.Linear, head).bias)
        found.append(score(hidden_RLH[layout.sources], layout.targets_N, own))
        last = next((values_N for values_N in found[0] if values_N.requires_grad), found[0][0])
        return zeros_after(last, (*shape, 1), hidden_RLH.dtype)

    with _forward_of(head, forward):
        yield found
    assert len(found) == 1, f"the head was called {len(found)} times in a forward pass"


def is_linear(head: nn.Module) -> bool:
    """Whether it multiplies by its weight, and no more."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


@torch.no_grad()
def _probe(model: nn.Module, config: PreTrainedConfig, head: nn.Module | None, ids_1L: Tensor) -> tuple[LogitRule | None, str]:
    """The rule that gives the model's own logits of a few tokens; without one, why there is none."""
    if head is None:
        return None, "does not name its head (get_output_embeddings)"
    own_forward = head.forward
    returned: list[Tensor] = []

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        logits = own_forward(*args, **kwargs)
        # wide enough to tell a cap from none, whatever the weights are
        returned.append(torch.linspace(-100, 100, logits.numel(), device=logits.device).view_as(logits).to(logits.dtype))
        return returned[-1].clone()

    with _forward_of(head, forward), eval_mode(model):
        logits_1LV = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False).logits
    if len(returned) != 1 or returned[0].shape != logits_1LV.shape or returned[0].shape[:2] != ids_1L.shape:
        return None, f"does not call its head once on all hidden states, but {len(returned)} times"
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (returned[0], logits_1LV))
    errors = [(float((rule(returned[0]) - logits_1LV).abs().max()), rule) for rule in _candidates(config)]
    error, rule = min(errors, key=lambda pair: pair[0])
    known = error <= 4 * eps * float(logits_1LV.abs().max()) < math.inf
    return (rule, "") if known else (None, "does more to its logits than to scale or cap them by numbers of its configuration")


def _candidates(config: PreTrainedConfig) -> Iterator[LogitRule]:
    """No rule, and those that the numbers of a configuration allow."""
    numbers = {**config.to_dict(), **config.get_text_config().to_dict()}
    found = {
        kind: [float(v) for name in names if isinstance(v := numbers.get(name), int | float)] for kind, names in FIELDS.items()
    }
    scales = [
        LogitRule(),
        *(LogitRule(times=value) for value in found["times"]),
        *(LogitRule(over=v) for v in found["over"] if v),
    ]
    yield from scales
    yield from (replace(scale, cap=cap) for scale in scales for cap in found["cap"] if cap)


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module.forward` is `forward`; its hooks stay."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
