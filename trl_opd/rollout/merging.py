"""LoRA adapters as part of the weights while completions are sampled: three matrix products a layer become one.

The base is not added to and subtracted from, which would change it a little each time: each weight is swapped for a sum
that was made for the rollout, and swapped back for the very tensor that it was. That takes a second copy of those weights.

What merging changes is the rounding. With weights in fp32 it cannot be seen; weights in bf16 keep 8 bits of base + adapter, so
that the log-probs of the sampled tokens differ from the trainer's more than they do anyhow (docs/rollouts.md has figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import checks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Inside, plain LoRA layers multiply by base + adapters at once; afterwards, also after an error, all is as it was.

    A layer that cannot be merged exactly computes as always: see `mergeable`. On a GPU with less free memory than
    twice what the second copy takes, nothing is merged and a warning says so.
    """
    layers = mergeable(model)
    if not _has_room([_weight(layer) for layer in layers]):
        layers = []
    originals: list[tuple[LoraLinear, Tensor]] = []
    try:
        for layer in layers:
            weight = _weight(layer)
            summed = _merged_weight(layer)
            originals.append((layer, weight.data))
            weight.data = summed
            layer.merged_adapters.extend(_active(layer))
        yield
    finally:
        for layer, original in originals:
            _weight(layer).data = original
            layer.merged_adapters.clear()


def mergeable(model: nn.Module) -> list[LoraLinear]:
    """The layers whose adapters are an ordinary sum on an ordinary weight that no other layer uses.

    Not: quantised or sharded weights, weights that are elsewhere at the moment (offloaded), an output layer tied to the
    embedding, DoRA and its like, adapters with a bias, what is merged or disabled already.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    layers = [module for module in model.modules() if type(module) is LoraLinear and _is_plain(module)]
    return [layer for layer in layers if uses[id(_weight(layer))] == 1]


def _is_plain(layer: LoraLinear) -> bool:
    base, active = layer.get_base_layer(), _active(layer)
    if not active or layer.merged or layer.disable_adapters or type(base) not in (nn.Linear, Conv1D):
        return False
    if any(name in layer.lora_variant or layer.lora_bias[name] for name in active):
        return False
    parts: list[Any] = [base.weight, *(part[name].weight for name in active for part in (layer.lora_A, layer.lora_B))]
    # the type of `data` is another where a tensor is one of several processes' parts, or packed
    return all(
        type(part.data) is Tensor and part.dtype in FLOATS and part.device == base.weight.device for part in parts
    ) and (base.weight.device.type != "meta")


def _weight(layer: LoraLinear) -> Tensor:
    return cast(Tensor, layer.get_base_layer().weight)


def _active(layer: LoraLinear) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


@torch.no_grad()
def _merged_weight(layer: LoraLinear) -> Tensor:
    """Base + scaling × B A of each active adapter: a new tensor, summed in fp32 at least, rounded once."""
    weight = _weight(layer)
    precision = torch.promote_types(weight.dtype, torch.float32)
    summed = weight.to(precision)
    with torch.autocast(weight.device.type, enabled=False):
        for name in _active(layer):
            a, b = (cast(Tensor, part[name].weight).to(precision) for part in (layer.lora_A, layer.lora_B))
            left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)  # such a weight stands (in, out)
            summed = torch.addmm(summed, left, right, alpha=layer.scaling[name])
    return summed.to(weight.dtype)


def _has_room(weights: list[Tensor]) -> bool:
    """Whether each GPU has twice the memory that a copy of its weights takes; the other half is for the KV cache."""
    sizes = Counter[torch.device]()
    for weight in weights:
        if weight.device.type == "cuda":
            sizes[weight.device] += weight.numel() * weight.element_size()
    for device, size in sizes.items():
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] + unused < 2 * size:
            checks.warn(
                f"Rollouts run with the adapters beside the weights, about a sixth slower: the sum of both would take "
                f"{size / 2**30:.1f} GiB on {device} while completions are sampled, more than half of what is free there. "
                "Smaller batches or a model in bf16 make room."
            )
            return False
    return True
