"""Log-probabilities of given tokens under a causal language model: what shifts by one is `layout.py`.

Shapes: B sequences, T tokens, N tokens to score, V vocabulary.

How this differs from the usual code:
1. Sequences stand in the rows of a forward pass as `layout.py` says: flush left, what a group has in common once. Their
   values are moved back after it.
2. Log-softmax is taken in fp32 (or in float64 for a float64 model), also under bf16 autocast.
3. The policy is the softmax over the tokenizer's ids. The rows a checkpoint pads its vocabulary with (Qwen2.5-0.5B has
   151,936 for 151,665 ids) are cut off here, as they are when sampling, so that models padded differently agree on it.
4. There are logits of the wanted tokens only, and of some of them at a time (`heads.py`), if what the model does after its
   head is known (`last_layer.py`); of any other model its own logits are used.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .last_layer import PROBE_TOKENS, known_head, scoring
from .layout import Layout, pass_limit, plan_passes
from .linear_head import Policy
from .processes import evened
from .prompt_sharing import prompt_sharing
from .scorers import HiddenStates, LogProbs, Scorer


def token_logps(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    wanted_mask: Tensor | None = None,
) -> Tensor:
    """Log-probability of each token given the tokens before it, `log p(ids[t] | ids[<t])`, differentiable.

    Args:
        model: A causal language model: called with `input_ids`, `attention_mask` and `use_cache`, returns `.logits`.
        input_ids: (B, T) token ids.
        attention_mask: (B, T), 1 on real tokens, 0 on padding, which may stand on either side.
        temperature: The logits are divided by it; > 0.
        vocab_size: Number of ids the policy ranges over; None for every row of the model's head.
        wanted_mask: (B, T), 1 on the tokens to score, which others do not add to; None for all real ones.

    Returns:
        (B, T) nats, fp32 or better. The value at t belongs to token t; a row's first token, padding and what is not wanted
        get 0.
    """
    policy = Policy(temperature, vocab_size)
    layout = Layout.of(input_ids, attention_mask, wanted_mask, prompt_sharing(model))
    return score(model, layout, LogProbs(policy))[0]


@torch.no_grad()
def score_in_batches(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    wanted_mask: Tensor | None = None,
    *,
    temperature: float,
    vocab_size: int,
    batch_size: int,
    max_tokens: int | None = None,
    hidden: dict[int, Tensor] | None = None,
) -> Tensor:
    """`token_logps` without gradient, in several forward passes: (B, T).

    A pass has at most `max_tokens` tokens, by default those of `batch_size` times the longest sequence. Of a model that is
    spread over processes it is one of all of them: each makes as many as any. `hidden` is filled with the head's inputs
    (n, H) at the wanted tokens of each sequence that has any, by its number; not if the model's head is unknown.
    """
    wanted_mask = attention_mask if wanted_mask is None else wanted_mask
    limit = pass_limit(attention_mask, batch_size, max_tokens)
    policy, sharing = Policy(temperature, vocab_size), prompt_sharing(model)
    scores_BT: Tensor | float = 0.0
    for rows in evened(plan_passes(input_ids, attention_mask, wanted_mask, sharing, limit), model):
        layout = Layout.of(input_ids, attention_mask, wanted_mask if rows else torch.zeros_like(wanted_mask), sharing, rows)
        scorer = HiddenStates(policy, kept=[])
        scores_BT = scores_BT + score(model, layout, scorer if hidden is not None else LogProbs(policy))[0]
        if hidden is not None and scorer.kept:
            numbers_b, counts_b = layout.places[0].unique_consecutive(return_counts=True)
            hidden |= dict(zip(numbers_b.tolist(), scorer.kept[0].split(counts_b.tolist()), strict=True))
    return cast(Tensor, scores_BT)


def score_tokens(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    wanted_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    rows: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps` and, without gradient, the entropy (nats) of the distribution each token was drawn from: two (B, T).

    `rows` are those of `plan_passes`, by default what costs least.
    """
    policy = Policy(temperature, vocab_size)
    layout = Layout.of(input_ids, attention_mask, wanted_mask, prompt_sharing(model), rows)
    logps_BT, entropy_BT = score(model, layout, LogProbs(policy, entropy=True))
    return logps_BT, entropy_BT


@torch.no_grad()
def top_tokens(
    model: nn.Module | Any, input_ids: Tensor, attention_mask: Tensor, k: int, *, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens at each place and their log-probs in nats, likeliest first: two (B, T, k).

    A row at a time, from its whole logits. Those at t compete with token t; a row's first place and padding have id 0 and 0
    nats.
    """
    policy = Policy(temperature, vocab_size)
    found_ids, found_logps = [], []
    for ids_1T, mask_1T in zip(input_ids.split(1), attention_mask.split(1), strict=True):
        layout = Layout.of(ids_1T, mask_1T)
        logits_NV = policy.logits(model(**layout.inputs()).logits[layout.sources])
        top_NK = logits_NV.topk(k)
        logps_NK = top_NK.values - logits_NV.logsumexp(dim=-1, keepdim=True)
        for found, values_NK in ((found_ids, top_NK.indices), (found_logps, logps_NK)):
            found.append(torch.stack([layout.moved_back(values_N) for values_N in values_NK.unbind(-1)], dim=-1))
    return torch.cat(found_ids), torch.cat(found_logps)


def score(model: nn.Module | Any, layout: Layout, scorer: Scorer) -> tuple[Tensor, ...]:
    """What `scorer` finds, (B, T) each: from here on, what belongs to a token stands at that token's place."""
    known = known_head(model, layout.ids_RL[:1, :PROBE_TOKENS])
    if known is None:
        logits_NV = model(**layout.inputs()).logits[layout.sources]
        return tuple(layout.moved_back(values_N) for values_N in scorer.of_logits(logits_NV, layout.targets_N))
    head, rule = known
    with scoring(head, layout, scorer.under(rule).of_hidden) as found:
        zeros_RL1 = model(**layout.inputs()).logits
    # FSDP and DDP prepare for the backward pass at the gradient of the model's output: there must be one
    touched = zeros_RL1.sum()
    values = [layout.moved_back(values_N) for values_N in found[0]]
    return tuple(value_BT + touched.to(value_BT.dtype) if value_BT.requires_grad else value_BT for value_BT in values)
