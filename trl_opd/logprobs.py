"""Log-probabilities of given tokens under a causal language model: the only place that shifts by one.

Shapes: B sequences, T tokens, L tokens of the longest row without its padding, N tokens to score, V vocabulary.

How this differs from the usual code:
1. Rows are moved flush left before the forward pass and their values moved back after it. A causal model then gives every
   row the values it gives that row alone, whatever its positions are (rotary, learned, ALiBi, a recurrent state), since
   padding comes after all that is scored.
2. Log-softmax is taken in fp32 (or in float64 for a float64 model), also under bf16 autocast.
3. The policy is the softmax over the tokenizer's ids. The rows a checkpoint pads its vocabulary with (Qwen2.5-0.5B has
   151,936 for 151,665 ids) are cut off here, as they are when sampling, so that models padded differently agree on it.
4. There are logits of the wanted tokens only, and of some of them at a time (`heads.py`), if what the model does after its
   head is known (`last_layer.py`); of any other model its own logits are used.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .heads import Policy, score_logits
from .last_layer import PROBE_TOKENS, known_head, scoring


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
    return _score(model, _FlushLeft.of(input_ids, attention_mask, wanted_mask), policy, entropy=False)[0]


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
) -> Tensor:
    """`token_logps` without gradient, `batch_size` sequences at a time: (B, T)."""
    wanted_mask = attention_mask if wanted_mask is None else wanted_mask
    settings: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab_size}
    parts = (tensor.split(batch_size) for tensor in (input_ids, attention_mask, wanted_mask))
    return torch.cat([token_logps(model, i, m, wanted_mask=w, **settings) for i, m, w in zip(*parts, strict=True)])


def score_tokens(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    wanted_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps` and, without gradient, the entropy (nats) of the distribution each token was drawn from: two (B, T)."""
    policy = Policy(temperature, vocab_size)
    return _score(model, _FlushLeft.of(input_ids, attention_mask, wanted_mask), policy, entropy=True)


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
        rows = _FlushLeft.of(ids_1T, mask_1T, None)
        logits_NV = policy.logits(rows.called(model)[:, :-1][rows.wanted_BL[:, 1:]])
        top_NK = logits_NV.topk(k)
        logps_NK = top_NK.values - logits_NV.logsumexp(dim=-1, keepdim=True)
        for found, values_NK in ((found_ids, top_NK.indices), (found_logps, logps_NK)):
            found.append(torch.stack([rows.moved_back(values_N) for values_N in values_NK.unbind(-1)], dim=-1))
    return torch.cat(found_ids), torch.cat(found_logps)


@dataclass(frozen=True)
class _FlushLeft:
    """Rows moved to the left edge; what is found out about their tokens comes back in the shape of the input."""

    ids_BL: Tensor
    mask_BL: Tensor
    """0 on padding, in the type of the caller's."""
    wanted_BL: Tensor
    """True on the N tokens to score; never on a row's first."""
    positions_BL: Tensor
    """Where each token stands in the input."""
    width: int

    @classmethod
    def of(cls, ids_BT: Tensor, attention_mask_BT: Tensor, wanted_BT: Tensor | None) -> "_FlushLeft":
        real_BT = attention_mask_BT.bool()
        order_BL = torch.argsort(~real_BT, dim=1, stable=True)[:, : int(real_BT.sum(dim=1).max())]
        wanted_BL = (real_BT if wanted_BT is None else real_BT & wanted_BT.bool()).gather(1, order_BL)
        wanted_BL[:, :1] = False
        return cls(ids_BT.gather(1, order_BL), attention_mask_BT.gather(1, order_BL), wanted_BL, order_BL, ids_BT.shape[1])

    def called(self, model: nn.Module | Any) -> Tensor:
        """The model's logits, (B, L, V)."""
        return model(input_ids=self.ids_BL, attention_mask=self.mask_BL, use_cache=False).logits

    def moved_back(self, values_N: Tensor) -> Tensor:
        """(B, T): the values of the wanted tokens at their places, 0 elsewhere."""
        rows_N, columns_N = self.wanted_BL.nonzero(as_tuple=True)
        values_BT = values_N.new_zeros(len(self.ids_BL), self.width)
        return values_BT.index_put((rows_N, self.positions_BL[rows_N, columns_N]), values_N)


def _score(model: nn.Module | Any, rows: _FlushLeft, policy: Policy, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and, if asked for, entropies: (B, T). From here on, what belongs to a token stands at that token's place."""
    known = known_head(model, rows.ids_BL[:1, :PROBE_TOKENS])
    if known is None:
        wanted_BL = rows.wanted_BL[:, 1:]
        logits_NV = rows.called(model)[:, :-1][wanted_BL]
        scores = score_logits(logits_NV, rows.ids_BL[:, 1:][wanted_BL], policy, entropy=entropy)
        logps_BT, entropy_BT = (rows.moved_back(values_N) for values_N in scores)
        return logps_BT, entropy_BT
    head, rule = known
    with scoring(head, rows.ids_BL, rows.wanted_BL, replace(policy, rule=rule), entropy=entropy) as found:
        zeros_BL1 = rows.called(model)
    logps_BT, entropy_BT = (rows.moved_back(values_N) for values_N in found[0])
    # FSDP and DDP prepare for the backward pass at the gradient of the model's output: there must be one
    return logps_BT + zeros_BL1.sum().to(logps_BT.dtype), entropy_BT
