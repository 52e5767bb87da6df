"""From prompts to sampled tokens with `generate`, which is asked again as rows come to their end.

A prompt that stands several times in a chunk is read once; its keys and values are then copied to each of its rows. Rows that
have ended are dropped from the batch, with the columns that padded theirs, so that the others go on in a smaller one. Each row
has random numbers of its own: what is sampled does not depend on any of this.

Both need a KV cache whose rows can be copied and dropped: plain attention to all that came before. Models with a sliding
window, a recurrent state or images, virtual tokens of prompt tuning, and models that are spread over processes (which must all
go on until the last has ended) are given to `generate` once, each row with its prompt.

Shapes: B rows still written, T tokens so far, U different prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from torch.profiler import record_function
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from ..models import without_peft
from .sampling import PolicySampler

ENOUGH = 8
"""Rows are dropped once one in so many has ended: a new `generate` and a copy of the cache cost about what one token costs."""


class Ended(StoppingCriteria):
    """Which rows have ended, each by a stop token or at its limit; tells `generate` to stop once `enough` have.

    Args:
        stop_ids: (S,) token ids.
        limits_B: The most new tokens of each row.
        width: Columns before the first new token.
        enough: Rows that must have ended for `generate` to return.
    """

    def __init__(self, stop_ids: Tensor, limits_B: Tensor, width: int, enough: int) -> None:
        self.stop_ids, self.limits_B, self.width, self.enough = stop_ids, limits_B, width, enough
        self.ended_B = torch.zeros_like(limits_B, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(B,) whether `generate` is done with a row, asked after each token."""
        self.ended_B |= torch.isin(input_ids[:, -1], self.stop_ids) | (self.limits_B <= input_ids.shape[1] - self.width)
        return self.ended_B | (self.ended_B.sum() >= self.enough)  # no number is read: a GPU would have to be waited for


def sample_rows(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    sampler: PolicySampler,
    stop_ids: Sequence[int],
    *,
    pad_id: int | None,
    synced_gpus: bool,
) -> None:
    """Samples until each row has drawn a stop token or `limits` tokens; they are in `sampler` then.

    Args:
        model: In eval mode, without gradient, its generation config empty.
        prompts: One for each row of `sampler`.
        limits: At least 1.
        sampler: Draws and keeps the tokens. What it holds behind the end of a row is to be ignored.
        stop_ids: Token ids that end a row.
        pad_id: See `padded`.
        synced_gpus: Whether the processes hold parts of one model, so that each must go on until the last is done.
    """
    device = sampler.rows_B.device
    stops, limits_B = torch.tensor(stop_ids, device=device), torch.tensor(limits, device=device)
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    ids_UT, mask_UT = padded([list(prompt) for prompt in number], pad_id, device)
    read = None
    if not synced_gpus and has_cache_of_rows(model):
        with record_function("prefill"):
            read = _prefill(model, ids_UT, mask_UT)
    if read is None:
        ids_BT, mask_BT = padded(prompts, pad_id, device)
        ended = Ended(stops, limits_B, ids_BT.shape[1], len(prompts))
        with record_function("decode"):
            _generate(model, ids_BT, mask_BT, max(limits), sampler, ended, synced_gpus=synced_gpus)
        return
    logits_UV, cache = read
    rows_B = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)
    ids_BT, mask_BT = ids_UT[rows_B], mask_UT[rows_B]
    ended = Ended(stops, limits_B, ids_BT.shape[1], 0)
    ids_BT = torch.cat([ids_BT, sampler.sample(ids_BT, logits_UV[rows_B])], dim=1)
    del logits_UV, read
    ended(ids_BT, None)
    while not ended.ended_B.all():
        kept_B = (~ended.ended_B).nonzero()[:, 0]
        sampler.rows_B, limits_B = sampler.rows_B[kept_B], limits_B[kept_B]
        ids_BT, mask_BT = ids_BT[kept_B], mask_BT[kept_B]
        unused = int(mask_BT.any(dim=0).int().argmax())  # columns that padded rows now gone
        select(cache, rows_B[kept_B], unused)
        ids_BT, mask_BT = ids_BT[:, unused:], mask_BT[:, unused:]
        ended = Ended(stops, limits_B, ids_BT.shape[1] - sampler.length, -(-len(kept_B) // ENOUGH))
        left = int(limits_B.max()) - sampler.length
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), ids_BT.shape[1] - mask_BT.shape[1])], dim=1)
        with record_function("decode"):
            ids_BT = _generate(model, ids_BT, mask_BT, left, sampler, ended, cache=cache)
        rows_B = torch.arange(len(ids_BT), device=device)


def padded(prompts: Sequence[list[int]], pad_id: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T) ids and attention mask, padded on the left with `pad_id`; None: with each prompt's first token.

    A repetition penalty counts what pads, too, and the first token is in the row anyhow.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = [(prompt[:1] if pad_id is None else [pad_id]) * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def has_cache_of_rows(model: PreTrainedModel | PeftModel) -> bool:
    """Whether all that `model` remembers of a row are keys and values of each of its tokens."""
    if isinstance(model, PeftModel) and any(model.peft_config[name].is_prompt_learning for name in model.active_adapters):
        return False
    base = without_peft(model)
    text = base.config.get_text_config(decoder=True)
    if base._is_stateful:  # what it remembers is in its layers
        return False
    if text is not base.config or not base._supports_default_dynamic_cache():  # what `generate` asks itself
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=text).layers)


def select(cache: DynamicCache, rows_B: Tensor, unused: int) -> None:
    """Leaves these rows of the cache, in this order (one may stand several times), without its first `unused` columns."""
    for layer in cast(list[DynamicLayer], cache.layers):
        if layer.is_initialized:  # one that shares another's keys is not
            assert layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[:, :, unused:][rows_B], layer.values[:, :, unused:][rows_B]


def _prefill(model: PreTrainedModel | PeftModel, ids_UT: Tensor, mask_UT: Tensor) -> tuple[Tensor, DynamicCache] | None:
    """(U, V) logits of the first new token in fp32, and the cache of the prompts; None if the model keeps no such cache."""
    config = GenerationConfig(
        max_new_tokens=1, do_sample=False, use_cache=True, return_dict_in_generate=True, output_logits=True
    )
    output = cast(Any, model).generate(input_ids=ids_UT, attention_mask=mask_UT, generation_config=config)
    cache = output.cache
    kept = isinstance(cache, DynamicCache) and cache.get_seq_length() == ids_UT.shape[1]
    return (output.logits[0], cache) if kept and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _generate(
    model: PreTrainedModel | PeftModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    limit: int,
    sampler: PolicySampler,
    ended: Ended,
    **more: Any,
) -> Tensor:
    """The rows with their new tokens, at most `limit`."""
    return cast(Any, model).generate(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        generation_config=GenerationConfig(max_new_tokens=limit, do_sample=False, use_cache=True),
        logits_processor=LogitsProcessorList([sampler]),
        stopping_criteria=StoppingCriteriaList([ended]),
        **more,
    )
