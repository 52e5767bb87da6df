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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel

from ..batch import Completion
from ..config import OnPolicyDistillationConfig
from ..models import eval_mode
from ..processes import gathered
from .decoding import sample_rows
from .merging import merged
from .sampling import PolicySampler, uniforms


class TransformersEngine:
    """Samples with the training weights themselves, a chunk of `per_device_rollout_batch_size` prompts at a time.

    Args:
        args: Sampling settings.
        stop_ids: Every token id that ends a completion.
        pad_id: Fills ragged rows while generating, unless a repetition penalty would count it; its value is irrelevant.
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
        self,
        model: PreTrainedModel | PeftModel,
        prompts: list[list[int]],
        seeds: list[int] | None = None,
        limits: list[int] | None = None,
    ) -> list[Completion]:
        """Samples one completion for each prompt; see `RolloutEngine`."""
        if seeds is None:
            seeds = torch.randint(2**62, (len(prompts),)).tolist()
        limits = limits or [self.args.max_completion_length] * len(prompts)
        rows = list(zip(prompts, seeds, limits, strict=True))
        # those of equal length, and equal ones, side by side: little padding, and each prompt is read once
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row]), reverse=True)
        size = self.args.per_device_rollout_batch_size or self.args.step_batch_size
        completions: dict[int, Completion] = {}
        with _generating(model), gathered(model) if self.args.gather_for_generation else nullcontext(), merged(model):
            for chunk in (order[i : i + size] for i in range(0, len(order), size)):
                sampled = self._generate_chunk(model, *zip(*(rows[row] for row in chunk), strict=True))
                completions.update(zip(chunk, sampled, strict=True))
        return [completions[row] for row in range(len(prompts))]

    def _generate_chunk(
        self, model: PreTrainedModel | PeftModel, prompts: Sequence[list[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Completion]:
        sampler = PolicySampler(self.args, self.vocab_size, uniforms(seeds, max(limits), self.args.device))
        pad_id = self.pad_id if sampler.penalty is None else None
        sample_rows(model, prompts, limits, sampler, self.stop_ids, pad_id=pad_id, synced_gpus=self.synced_gpus)
        sampled = zip(sampler.ids_BT.tolist(), sampler.logps_BT.tolist(), limits, strict=True)
        return [self._completion(*row) for row in sampled]

    def _completion(self, ids: list[int], logps: list[float], limit: int) -> Completion:
        """Cuts a generated row after its first stop token, or at its limit."""
        stop = next((t + 1 for t, token in enumerate(ids[:limit]) if token in self.stop_ids), None)
        length = limit if stop is None else stop
        return Completion(ids=ids[:length], logps=logps[:length], stopped=stop is not None)


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
