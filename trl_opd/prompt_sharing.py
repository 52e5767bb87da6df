"""Finds out whether sequences may share their beginning in a row of a model's forward pass (`layout.py`)."""

from __future__ import annotations

import inspect
import weakref
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from .layout import Layout, Sharing
from .models import eval_mode, unwrapped

ATTENTIONS = ("sdpa", "eager")
"""Implementations of attention that take a mask for each pair of tokens."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""What configurations call the number of tokens that a layer of limited attention sees."""

_FOUND: weakref.WeakKeyDictionary[nn.Module, dict[str, Sharing | None]] = weakref.WeakKeyDictionary()
"""By the implementation of attention, which may be set anew: each takes another mask."""


def prompt_sharing(model: Any) -> Sharing | None:
    """What the model allows; None if every sequence needs a row of its own: no transformer of full attention is seen in it.

    At the first call for a model, a few tokens pass through it without gradient (on every process, where there are several),
    in rows of their own and in one row: only if it gives them the same logits, sequences may share a row.
    """
    inner, compiled = unwrapped(model)
    if compiled or not isinstance(inner, PreTrainedModel):
        return None
    found = _FOUND.setdefault(inner, {})
    attention = str(inner.config.get_text_config()._attn_implementation)
    if attention not in found:
        found[attention] = _probe(model, inner)
    return found[attention]


def _probe(model: nn.Module, inner: PreTrainedModel) -> Sharing | None:
    config = inner.config.get_text_config()
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    attention = config._attn_implementation
    if inner._is_stateful or not inner._supports_attention_backend or not takes_positions or attention not in ATTENTIONS:
        return None
    weight = cast(Tensor, inner.get_input_embeddings().weight)
    dtype = None if attention == "sdpa" else weight.dtype
    sharing = Sharing(longest=_window(config), equal_length=6.0 * config.hidden_size, dtype=dtype)
    return sharing if _agrees(model, sharing, weight.device) else None


@torch.no_grad()
def _agrees(model: nn.Module, sharing: Sharing, device: torch.device) -> bool:
    """Whether the model scores two sequences in one row as in a row each, as far as rounding allows."""
    ids_BT = torch.tensor([[3, 1, 2, 0, 3, 1], [3, 1, 2, 4, 0, 0]], device=device)
    mask_BT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], device=device)
    wanted_BT = mask_BT * torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    logits: list[Tensor] = []
    with eval_mode(model), torch.autocast(device.type, enabled=False):
        for allowed in (None, Sharing(dtype=sharing.dtype)):
            layout = Layout.of(ids_BT, mask_BT, wanted_BT, allowed)
            logits.append(model(**layout.inputs()).logits[layout.sources])
    alone_NV, together_NV = logits
    rounding = 4 * max(1e-5, _precision(model, alone_NV.dtype))
    return bool((alone_NV - together_NV).abs().max() <= rounding * alone_NV.abs().max())


def _precision(model: nn.Module, dtype: torch.dtype) -> float:
    """Of what the model computes in, outside of autocast, the coarsest."""
    dtypes = {dtype, *(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())}
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    dtypes |= {given for shard in shards if (given := shard._get_fsdp_state()._mp_policy.param_dtype) is not None}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _window(config: PreTrainedConfig) -> float:
    """Tokens that the narrowest layer sees; a row's own mask has no window in it."""
    numbers = config.to_dict()
    if numbers.get("use_sliding_window") is False:
        return inf
    return min((float(value) for name in WINDOWS if (value := numbers.get(name))), default=inf)
