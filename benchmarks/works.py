"""What the arms of a benchmark train on: prompts of a given number of tokens, and completions of a given length each.

Lengths are forced, so that every arm trains on the same number of tokens whatever it samples.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from heal_pruned import QUESTIONS, TOPICS

Lengths = dict[tuple[int, ...], int]
"""Tokens of the completion of each prompt, by the prompt's ids."""


@dataclass(frozen=True)
class Work:
    """An optimizer step: one entry a prompt in `prompt_tokens` and `completion_tokens`, and G completions of each."""

    name: str
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    num_generations: int
    micro_batch: int
    """Completions in a forward and backward pass; the step has as many of them as it takes."""

    @property
    def rows(self) -> int:
        """Completions of the step."""
        return len(self.prompt_tokens) * self.num_generations

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step."""
        assert self.rows % self.micro_batch == 0
        return self.rows // self.micro_batch

    @property
    def trained_tokens(self) -> int:
        """Action tokens of the step."""
        return sum(self.completion_tokens) * self.num_generations

    def warm_up(self) -> Work:
        """As many prompts and completions, short ones: for what only a first step does."""
        count = len(self.prompt_tokens)
        return replace(self, name="warm-up", prompt_tokens=(6,) * count, completion_tokens=(4,) * count)


def ragged(low: int, high: int, count: int, seed: int) -> tuple[int, ...]:
    """`count` lengths spread evenly from `low` to `high`, in a fixed random order."""
    return tuple(int(n) for n in np.random.default_rng(seed).permutation(np.linspace(low, high, count).round()))


WORKS = {
    work.name: work
    for work in (
        Work("W1", (40,) * 4, (64,) * 4, num_generations=4, micro_batch=16),
        Work("W2", (512,) * 2, (32,) * 2, num_generations=8, micro_batch=8),
        Work("W3", ragged(8, 200, 16, seed=0), ragged(8, 128, 16, seed=1), num_generations=1, micro_batch=8),
    )
}


def prompts(lengths: tuple[int, ...], tokenizer: Any, seed: int = 0) -> list[str]:
    """English texts, each of exactly so many tokens, all different."""
    topics = [topic.strip() for topic in TOPICS.split(",")]
    questions = [question.format(topic) for question in QUESTIONS for topic in topics]
    ids = tokenizer(" ".join(np.random.default_rng(seed).permutation(questions)))["input_ids"]
    texts, start = [], 0
    for length in lengths:
        while len(tokenizer(text := tokenizer.decode(ids[start : start + length]))["input_ids"]) != length:
            start += 1  # a piece of a word may be joined otherwise than it was cut
        assert start + length <= len(ids)
        texts.append(text)
        start = (start + length) % (len(ids) - max(lengths))
    assert len(set(texts)) == len(texts)
    return texts


class ForcedLengths(LogitsProcessor):
    """Forbids the stop token until a row's last token, which it must be; for `generate`."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, lengths: Lengths, stop_id: int) -> None:
        self.width, self.stop_id = input_ids.shape[1], stop_id
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        self.last_B = torch.tensor([lengths[tuple(ids[real].tolist())] - 1 for ids, real in rows], device=input_ids.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores of the next token."""
        scores[:, self.stop_id] = -torch.inf
        last = self.last_B == input_ids.shape[1] - self.width
        scores[last] = -torch.inf
        scores[last, self.stop_id] = 0.0
        return scores
