"""Rollouts by `model.generate`, in the training process.

Shapes: B sequences, V rows of the model's head.

How this differs from calling `generate` as it is:
1. The checkpoint's own `generation_config` is set aside meanwhile: `generate` would fill every field that the caller leaves
   None from it (suppress_tokens, min_new_tokens, ...), and the tokens would come from another distribution than is trained.
2. The log-probability of each sampled token is taken while sampling: no second forward pass, no (T, B, V) scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..batch import Completion
from ..config import OnPolicyDistillationConfig
from ..models import eval_mode


class TransformersEngine:
    """Samples with the training weights themselves, a chunk of `per_device_rollout_batch_size` prompts at a time.

    Args:
        args: Sampling settings.
        stop_ids: Every token id that ends a completion.
        pad_id: Fills ragged rows while generating; its value is irrelevant.
        vocab_size: Number of ids the policy ranges over; rows of the head beyond are never sampled.
    """

    def __init__(self, args: OnPolicyDistillationConfig, *, stop_ids: list[int], pad_id: int, vocab_size: int) -> None:
        self.args, self.stop_ids, self.pad_id, self.vocab_size = args, stop_ids, pad_id, vocab_size

    def generate(self, model: PreTrainedModel | PeftModel, prompts: list[list[int]]) -> list[Completion]:
        """Samples one completion for each prompt; see `RolloutEngine`."""
        size = self.args.per_device_rollout_batch_size or self.args.step_batch_size
        with _generating(model):
            chunks = [self._generate_chunk(model, prompts[i : i + size]) for i in range(0, len(prompts), size)]
        return [completion for chunk in chunks for completion in chunk]

    def _generate_chunk(self, model: PreTrainedModel | PeftModel, prompts: list[list[int]]) -> list[Completion]:
        width = max(len(prompt) for prompt in prompts)
        ids = [[self.pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        attention_mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        recorder = SampledLogps(self.args.temperature, self.vocab_size)
        sequences = cast(Any, model).generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(attention_mask, device=model.device),
            generation_config=self._generation_config(),
            logits_processor=LogitsProcessorList([recorder]),
        )
        logps = recorder.finish(sequences)
        return [
            self._completion(row, row_logps)
            for row, row_logps in zip(sequences[:, width:].tolist(), logps.tolist(), strict=True)
        ]

    def _completion(self, ids: list[int], logps: list[float]) -> Completion:
        """Cuts a generated row after its first stop token."""
        length = next((t + 1 for t, token in enumerate(ids) if token in self.stop_ids), None)
        return Completion(ids=ids[:length], logps=logps[:length], stopped=length is not None)

    def _generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.args.max_completion_length,
            do_sample=True,
            temperature=1.0,  # `SampledLogps` divides by the temperature
            top_k=self.args.top_k,
            top_p=self.args.top_p,
            min_p=self.args.min_p,
            repetition_penalty=self.args.repetition_penalty,
            eos_token_id=self.stop_ids,
            pad_token_id=self.pad_id,
            use_cache=True,
        )


class SampledLogps(LogitsProcessor):
    """Makes the model's scores the policy's and notes the log-probability of each token drawn from it."""

    def __init__(self, temperature: float, vocab_size: int) -> None:
        self.temperature, self.vocab_size = temperature, vocab_size
        self.logps_BV: Tensor | None = None
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids)
        scores = scores / self.temperature
        scores[:, self.vocab_size :] = -torch.inf
        self.logps_BV = scores.log_softmax(dim=-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """(B, number of new tokens) nats, for the sequences that `generate` returned."""
        self._note(sequences)
        return torch.cat(self.columns, dim=1)

    def _note(self, input_ids: Tensor) -> None:
        if self.logps_BV is not None:
            self.columns.append(self.logps_BV.gather(1, input_ids[:, -1:]))


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
