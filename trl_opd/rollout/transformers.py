"""Rollouts by `model.generate`, in the training process.

Shapes: B sequences, T new tokens, V rows of the model's head.

How this differs from calling `generate` as it is:
1. The checkpoint's own `generation_config` is set aside meanwhile: `generate` would fill every field that the caller leaves
   None from it (suppress_tokens, min_new_tokens, ...), and the tokens would come from another distribution than is trained.
2. Each completion has random numbers of its own, one a token, drawn from its seed: it is the same in any batch and on any
   process. `generate` itself decodes greedily, from scores that leave it no other token than the one drawn.
3. The log-probability of each sampled token is taken while sampling: no second forward pass, no (T, B, V) scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..batch import Completion
from ..config import OnPolicyDistillationConfig
from ..models import eval_mode
from ..processes import gathered


class TransformersEngine:
    """Samples with the training weights themselves, a chunk of `per_device_rollout_batch_size` prompts at a time.

    Args:
        args: Sampling settings.
        stop_ids: Every token id that ends a completion.
        pad_id: Fills ragged rows while generating; its value is irrelevant.
        vocab_size: Number of ids the policy ranges over; rows of the head beyond are never sampled.
        synced_gpus: Whether the processes hold parts of one model, so that each must go on until the last is done.
    """

    def __init__(
        self,
        args: OnPolicyDistillationConfig,
        *,
        stop_ids: list[int],
        pad_id: int,
        vocab_size: int,
        synced_gpus: bool = False,
    ) -> None:
        self.args, self.stop_ids, self.pad_id, self.vocab_size = args, stop_ids, pad_id, vocab_size
        self.synced_gpus = synced_gpus

    max_gap = None
    whole_softmax = True

    def sync(self, model: PreTrainedModel | PeftModel) -> None:
        """Nothing to do: it samples from the weights that are trained."""

    def generate(
        self, model: PreTrainedModel | PeftModel, prompts: list[list[int]], seeds: list[int] | None = None
    ) -> list[Completion]:
        """Samples one completion for each prompt; see `RolloutEngine`."""
        if seeds is None:
            seeds = torch.randint(2**62, (len(prompts),)).tolist()
        size = self.args.per_device_rollout_batch_size or self.args.step_batch_size
        with _generating(model), gathered(model) if self.args.gather_for_generation else nullcontext():
            chunks = [
                self._generate_chunk(model, prompts[i : i + size], seeds[i : i + size]) for i in range(0, len(prompts), size)
            ]
        return [completion for chunk in chunks for completion in chunk]

    def _generate_chunk(
        self, model: PreTrainedModel | PeftModel, prompts: list[list[int]], seeds: list[int]
    ) -> list[Completion]:
        width, device = max(len(prompt) for prompt in prompts), self.args.device
        ids = [[self.pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        attention_mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        sampler = PolicySampler(self.args, self.vocab_size, uniforms(seeds, self.args.max_completion_length, device))
        sequences = cast(Any, model).generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(attention_mask, device=device),
            generation_config=self._generation_config(),
            logits_processor=LogitsProcessorList([sampler]),
            synced_gpus=self.synced_gpus,
        )
        new = sequences[:, width:]
        logps = torch.cat(sampler.columns, dim=1)[:, : new.shape[1]]
        return [self._completion(*row) for row in zip(new.tolist(), logps.tolist(), strict=True)]

    def _completion(self, ids: list[int], logps: list[float]) -> Completion:
        """Cuts a generated row after its first stop token."""
        length = next((t + 1 for t, token in enumerate(ids) if token in self.stop_ids), None)
        return Completion(ids=ids[:length], logps=logps[:length], stopped=length is not None)

    def _generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.args.max_completion_length,
            do_sample=False,  # `PolicySampler` has drawn the token
            eos_token_id=self.stop_ids,
            pad_token_id=self.pad_id,
            use_cache=True,
        )


class PolicySampler(LogitsProcessor):
    """Draws each token from the policy, notes its log-probability, and leaves `generate` no other token.

    Args:
        args: Temperature, and what truncates the distribution that tokens are drawn from (not the one they are scored by).
        vocab_size: Number of ids the policy ranges over.
        uniforms_BT: In (0, 1], what each token is drawn with.
    """

    def __init__(self, args: OnPolicyDistillationConfig, vocab_size: int, uniforms_BT: Tensor) -> None:
        self.temperature, self.vocab_size, self.uniforms_BT = args.temperature, vocab_size, uniforms_BT
        self.columns: list[Tensor] = []
        """(B, 1) nats for each token so far."""
        self.penalty = RepetitionPenaltyLogitsProcessor(args.repetition_penalty) if args.repetition_penalty != 1 else None
        self.truncations = LogitsProcessorList(
            [
                *([TopKLogitsWarper(args.top_k)] if args.top_k > 0 else []),
                *([TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []),
                *([MinPLogitsWarper(args.min_p)] if args.min_p else []),
            ]
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores of the next token: 0 for the one that is drawn, -inf for all others."""
        ids_BT = cast(torch.LongTensor, input_ids)
        penalized_BV = scores if self.penalty is None else self.penalty(ids_BT, cast(torch.FloatTensor, scores))
        drawn_from_BV = self.truncations(ids_BT, cast(torch.FloatTensor, self._policy(penalized_BV)))
        tokens_B1 = draw(drawn_from_BV.softmax(dim=-1), self.uniforms_BT[:, len(self.columns), None])
        self.columns.append(self._policy(scores).log_softmax(dim=-1).gather(1, tokens_B1))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens_B1, 0.0)

    def _policy(self, scores_BV: Tensor) -> Tensor:
        logits_BV = scores_BV / self.temperature
        logits_BV[:, self.vocab_size :] = -torch.inf
        return logits_BV


def uniforms(seeds: list[int], length: int, device: torch.device) -> Tensor:
    """(B, length) numbers in (0, 1], each row from its seed and no other."""
    # numpy's generators take all bits of a seed, torch's on the CPU the lower 32 only
    rows_BT = torch.from_numpy(1 - np.stack([np.random.default_rng(seed).random(length) for seed in seeds]))
    return rows_BT.to(device, torch.float32 if device.type == "mps" else torch.float64)  # MPS has no float64


def draw(probs_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """(B, 1) tokens by the inverse of the distribution function: the first whose cumulative probability reaches `uniforms`."""
    cumulative_BV = probs_BV.to(uniforms_B1.dtype).cumsum(dim=-1)
    tokens_B1 = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:])
    return tokens_B1.clamp(max=probs_BV.shape[1] - 1)  # NaN is never reached; `check_rollout` tells of it


@contextmanager
def _generating(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Eval mode, no gradient, and a generation config without the checkpoint's habits; afterwards all as before."""
    # `PeftModel.generate` overwrites its base model's generation config with its own, which is the base's unless it was set
    models = [model, model.get_base_model()] if isinstance(model, PeftModel) else [model]
    owners = [owner for owner in models if "generation_config" in vars(owner)]
    configs = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        for owner, config in zip(owners, configs, strict=True):
            owner.generation_config = config
