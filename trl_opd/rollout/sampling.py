"""Drawing tokens: from which distribution, with which random numbers, and what is noted of each.

Shapes: B sequences, T new tokens, V rows of the model's head, K entries of a block of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..config import OnPolicyDistillationConfig

BLOCK = 256
"""Entries of the vocabulary whose probabilities are added up first; near the square root of a large vocabulary."""


class PolicySampler(LogitsProcessor):
    """Draws each token from the policy, notes it with its log-probability, and leaves `generate` no other token.

    Args:
        args: Temperature, and what truncates the distribution that tokens are drawn from (not the one they are scored by).
        vocab_size: Number of ids the policy ranges over.
        uniforms_BT: In (0, 1], what each token is drawn with.
    """

    def __init__(self, args: OnPolicyDistillationConfig, vocab_size: int, uniforms_BT: Tensor) -> None:
        self.temperature, self.vocab_size, self.uniforms_BT = args.temperature, vocab_size, uniforms_BT
        self.rows_B = torch.arange(len(uniforms_BT), device=uniforms_BT.device)
        """The rows of `uniforms_BT` that are still written; the next scores are theirs."""
        self.length = 0
        """Tokens that each of them has."""
        self.ids_BT = torch.zeros_like(uniforms_BT, dtype=torch.long)
        self.logps_BT = torch.zeros_like(uniforms_BT, dtype=torch.float32)
        """Nats. What stands behind the end of a row means nothing, as in `ids_BT`."""
        self.penalty = RepetitionPenaltyLogitsProcessor(args.repetition_penalty) if args.repetition_penalty != 1 else None
        self.truncations = LogitsProcessorList(
            [
                *([TopKLogitsWarper(args.top_k)] if args.top_k > 0 else []),
                *([TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []),
                *([MinPLogitsWarper(args.min_p)] if args.min_p else []),
            ]
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores of the next token: 1 for the one that is drawn, 0 for all others. They overwrite `scores`."""
        tokens_B1 = self.sample(input_ids, scores)
        return scores.zero_().scatter_(1, tokens_B1, 1.0)  # a copy of the logits that `generate` made for this

    def sample(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        """(B, 1) tokens that follow `ids_BT`, drawn and noted. `scores_BV` is not changed."""
        logits_BV = self._policy(scores_BV)
        uniforms_B1 = self.uniforms_BT[self.rows_B, self.length, None]
        if self.penalty is None and not self.truncations:
            tokens_B1, normalizers_B1 = draw(logits_BV, uniforms_B1)
        else:
            tokens_B1, _ = draw(self._truncated(ids_BT, scores_BV), uniforms_B1)
            normalizers_B1 = logits_BV.logsumexp(dim=-1, keepdim=True)
        logps_B1 = logits_BV.gather(1, tokens_B1) - normalizers_B1
        self.ids_BT[self.rows_B, self.length] = tokens_B1[:, 0]
        self.logps_BT[self.rows_B, self.length] = logps_B1[:, 0].to(torch.float32)
        self.length += 1
        return tokens_B1

    def _policy(self, scores_BV: Tensor) -> Tensor:
        """Logits at the temperature, of the ids that the policy ranges over."""
        logits_BV = scores_BV[:, : self.vocab_size]
        return logits_BV if self.temperature == 1 else logits_BV / self.temperature

    def _truncated(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        ids, scores = cast(torch.LongTensor, ids_BT), cast(torch.FloatTensor, scores_BV)
        penalized_BV = scores if self.penalty is None else self.penalty(ids, scores)
        return self.truncations(ids, cast(torch.FloatTensor, self._policy(penalized_BV)))


def uniforms(seeds: Sequence[int], length: int, device: torch.device) -> Tensor:
    """(B, length) numbers in (0, 1], each row from its seed and no other."""
    # numpy's generators take all bits of a seed, torch's on the CPU the lower 32 only
    rows_BT = torch.from_numpy(1 - np.stack([np.random.default_rng(seed).random(length) for seed in seeds]))
    return rows_BT.to(device, torch.float32 if device.type == "mps" else torch.float64)  # MPS has no float64


def draw(logits_BV: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Draws by the inverse of the distribution function: the first token whose cumulative probability reaches `uniforms_B1`.

    The cumulative sum is taken over blocks, and then inside one block of each row only: over all of a large vocabulary, in the
    precision it takes, it would cost more than the exponentials. A token of probability 0 is never drawn.

    Returns:
        (B, 1) tokens, and the (B, 1) log of the sum of exponentials, of which one pass serves both.
    """
    greatest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    weights_BV = (logits_BV - greatest_B1).exp_()
    if rest := -weights_BV.shape[1] % BLOCK:
        weights_BV = pad(weights_BV, (0, rest))
    weights_BNK = weights_BV.unflatten(1, (-1, BLOCK))
    blocks_BN = weights_BNK.sum(dim=-1).to(uniforms_B1.dtype)
    cumulative_BN = blocks_BN.cumsum(dim=-1)
    total_B1 = cumulative_BN[:, -1:]
    target_B1 = uniforms_B1 * total_B1
    # NaN is never reached, nor is anything beside it; `check_rollout` tells of it
    block_B1 = torch.searchsorted(cumulative_BN, target_B1).clamp(max=cumulative_BN.shape[1] - 1)
    before_B1 = pad(cumulative_BN, (1, 0)).gather(1, block_B1)  # strictly below the target
    inside_BK = weights_BNK[torch.arange(len(weights_BNK), device=block_B1.device), block_B1[:, 0]]
    inside_BK = inside_BK.to(uniforms_B1.dtype).cumsum(dim=-1)
    # the block's sum is rounded otherwise than its cumulative sum: what lies between belongs to its last likely token
    index_B1 = torch.searchsorted(inside_BK, torch.minimum(target_B1 - before_B1, inside_BK[:, -1:]))
    tokens_B1 = (block_B1 * BLOCK + index_B1).clamp(max=logits_BV.shape[1] - 1)
    return tokens_B1, greatest_B1 + total_B1.log().to(greatest_B1.dtype)
