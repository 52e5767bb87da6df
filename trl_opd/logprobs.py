"""Log-probabilities of given tokens under a causal language model: the only place that shifts by one.

Shapes: B sequences, T tokens, L tokens of the longest row without its padding, V vocabulary.

How this differs from the usual code:
1. Rows are moved flush left before the forward pass and their values moved back after it. A causal model then gives every
   row the values it gives that row alone, whatever its positions are (rotary, learned, ALiBi, a recurrent state), since
   padding comes after all that is scored.
2. Log-softmax is taken in fp32 (or in float64 for a float64 model), also under bf16 autocast.
3. The policy is the softmax over the tokenizer's ids. The rows a checkpoint pads its vocabulary with (Qwen2.5-0.5B has
   151,936 for 151,665 ids) are cut off here, as they are when sampling, so that models padded differently agree on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def token_logps(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Log-probability of each token given the tokens before it, `log p(ids[t] | ids[<t])`, differentiable.

    Args:
        model: A causal language model: called with `input_ids`, `attention_mask` and `use_cache`, returns `.logits`.
        input_ids: (B, T) token ids.
        attention_mask: (B, T), 1 on real tokens, 0 on padding, which may stand on either side.
        temperature: The logits are divided by it; > 0.
        vocab_size: Number of ids the policy ranges over; None for every row of the model's head.

    Returns:
        (B, T) nats, fp32 or better. The value at t belongs to token t; a row's first token and padding get 0.
    """
    return _forward(model, input_ids, attention_mask, temperature, vocab_size).logps()


@torch.no_grad()
def score_in_batches(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    batch_size: int,
) -> Tensor:
    """`token_logps` without gradient, `batch_size` sequences at a time: (B, T)."""
    chunks = zip(input_ids.split(batch_size), attention_mask.split(batch_size), strict=True)
    return torch.cat([token_logps(model, i, m, temperature=temperature, vocab_size=vocab_size) for i, m in chunks])


def score_tokens(
    model: nn.Module | Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps` and, without gradient, the entropy (nats) of the distribution each token was drawn from: two (B, T)."""
    scored = _forward(model, input_ids, attention_mask, temperature, vocab_size)
    return scored.logps(), scored.entropy()


@torch.no_grad()
def top_tokens(
    model: nn.Module | Any, input_ids: Tensor, attention_mask: Tensor, k: int, *, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens at each place and their log-probs in nats, likeliest first: two (B, T, k).

    A row at a time. Those at t compete with token t; a row's first place and padding have id 0 and 0 nats.
    """
    rows = [
        _forward(model, ids_1T, mask_1T, temperature, vocab_size).top(k)
        for ids_1T, mask_1T in zip(input_ids.split(1), attention_mask.split(1), strict=True)
    ]
    return torch.cat([ids for ids, _ in rows]), torch.cat([logps for _, logps in rows])


@dataclass(frozen=True)
class _Scored:
    """A forward pass over rows that stand flush left; what is asked of it comes back in the shape of the input."""

    logits_BLV: Tensor
    """The policy's, at the position before each of `ids_BL`."""
    ids_BL: Tensor
    real_BL: Tensor
    """False on padding."""
    positions_BL: Tensor
    """Where each token stands in the input."""
    width: int

    def logps(self) -> Tensor:
        """(B, T) nats, differentiable."""
        chosen_BL = self.logits_BLV.gather(-1, self.ids_BL[..., None]).squeeze(-1)
        return self._moved_back(chosen_BL - self.logits_BLV.logsumexp(dim=-1))

    def entropy(self) -> Tensor:
        """(B, T) nats, without gradient."""
        return self._moved_back(_entropy(self.logits_BLV))

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """(B, T, k) ids and nats."""
        logits_BLK, ids_BLK = self.logits_BLV.topk(k)
        logps_BLK = logits_BLK - self.logits_BLV.logsumexp(dim=-1, keepdim=True)
        ids, logps = ([self._moved_back(column) for column in part.unbind(-1)] for part in (ids_BLK, logps_BLK))
        return torch.stack(ids, dim=-1), torch.stack(logps, dim=-1)

    def _moved_back(self, values_BL: Tensor) -> Tensor:
        values_BL = torch.where(self.real_BL, values_BL, values_BL.new_zeros(()))
        return values_BL.new_zeros(len(values_BL), self.width).scatter(1, self.positions_BL, values_BL)


def _forward(
    model: nn.Module | Any, ids_BT: Tensor, attention_mask_BT: Tensor, temperature: float, vocab_size: int | None
) -> _Scored:
    """Runs the model; from here on, what belongs to a token stands at that token's place."""
    real_BT = attention_mask_BT.bool()
    order_BL = torch.argsort(~real_BT, dim=1, stable=True)[:, : int(real_BT.sum(dim=1).max())]
    ids_BL, real_BL = ids_BT.gather(1, order_BL), real_BT.gather(1, order_BL)
    outputs = model(input_ids=ids_BL, attention_mask=real_BL.to(attention_mask_BT.dtype), use_cache=False)
    logits_BLV = _policy_logits(outputs.logits[:, :-1], temperature, vocab_size)
    return _Scored(logits_BLV, ids_BL[:, 1:], real_BL[:, 1:], order_BL[:, 1:], ids_BT.shape[1])


def _policy_logits(logits: Tensor, temperature: float, vocab_size: int | None) -> Tensor:
    """The logits the policy is the softmax of: the tokenizer's ids only, in fp32 or better, over the temperature."""
    return logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32)) / temperature


@torch.no_grad()
def _entropy(logits_BLV: Tensor) -> Tensor:
    """(B, L) nats; a row at a time, so that one row's probabilities are all the extra memory it takes."""
    rows = []
    for logits_LV in logits_BLV:
        logps_LV = logits_LV.log_softmax(dim=-1)
        # exp(-inf) * -inf is NaN where a logit is -inf; such a token adds nothing
        rows.append(-(logps_LV.exp() * logps_LV.clamp(min=torch.finfo(logps_LV.dtype).min)).sum(dim=-1))
    return torch.stack(rows)
