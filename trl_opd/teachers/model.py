"""A teacher that is a model in the training process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..batch import Rollout, pad_right
from ..logprobs import score_in_batches


class ModelTeacher:
    """Scores with a frozen model in eval mode.

    Args:
        model: The teacher; its parameters stop requiring gradients.
        temperature: That of the rollouts: student and teacher are compared at the same one.
        vocab_size: Number of ids the policies range over.
        batch_size: Sequences in a forward pass.
        context: Most tokens the teacher can read; None for any number.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, vocab_size: int, batch_size: int, context: int | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.temperature, self.vocab_size, self.batch_size, self.context = temperature, vocab_size, batch_size, context

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats; see `Teacher`."""
        self.model.eval()
        return score_rollout(self.model, rollout, self.temperature, self.vocab_size, self.batch_size, self.context)


class OffloadedTeacher(ModelTeacher):
    """A `ModelTeacher` whose weights are in CPU memory; for scoring they are copied, and the copies dropped again.

    Args:
        model: The teacher, on the CPU.
        device: Where it scores.
        scoring: As for `ModelTeacher`.
    """

    def __init__(self, model: nn.Module, device: torch.device, **scoring: Any) -> None:
        super().__init__(model, **scoring)
        self.device = device

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats; see `Teacher`."""
        self.model.eval()
        copies = {name: t.to(self.device) for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}

        def on_device(**inputs: Any) -> Any:
            return functional_call(self.model, copies, kwargs=inputs)

        return score_rollout(on_device, rollout, self.temperature, self.vocab_size, self.batch_size, self.context)


def score_rollout(
    model: nn.Module | Any, rollout: Rollout, temperature: float, vocab_size: int, batch_size: int, context: int | None
) -> Tensor:
    """(B, T) log-probs of a rollout's tokens under `model`, read after its teacher prompts where it has them.

    Raises:
        ValueError: If a row is longer than `context`; scores beyond it would be noise.
    """
    ids, attention_mask = _teacher_view(rollout)
    longest = int(attention_mask.sum(dim=1).max())
    if context is not None and longest > context:
        raise ValueError(
            f"The teacher would have to read {longest} tokens (prompt and completion), but its context is {context}. Shorten "
            "the teacher's prompts, or lower max_prompt_length or max_completion_length; if it can read more, set "
            "config.max_position_embeddings."
        )
    scores = score_in_batches(
        model, ids, attention_mask, temperature=temperature, vocab_size=vocab_size, batch_size=batch_size
    )
    return _student_view(scores, rollout)


def _teacher_view(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """The token ids and attention mask the teacher reads: its own prompts, if any, before the same completions."""
    if rollout.teacher_prompts is None:
        return rollout.ids_BT, rollout.attention_mask_BT
    completions = rollout.completion_ids()
    ids = [prompt + completion for prompt, completion in zip(rollout.teacher_prompts, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in ids], device=rollout.ids_BT.device)
    ids_padded = pad_right(ids, 0, torch.long, rollout.ids_BT.device)
    return ids_padded, torch.arange(ids_padded.shape[1], device=lengths.device) < lengths[:, None]


def _student_view(scores: Tensor, rollout: Rollout) -> Tensor:
    """Moves the scores of completion tokens from the teacher's positions to the student's."""
    if rollout.teacher_prompts is None:
        return scores
    scores_BT = scores.new_zeros(rollout.ids_BT.shape)
    starts, lengths = rollout.prompt_lengths_B.tolist(), rollout.completion_lengths_B.tolist()
    for row, (start, length, prompt) in enumerate(zip(starts, lengths, rollout.teacher_prompts, strict=True)):
        scores_BT[row, start : start + length] = scores[row, len(prompt) : len(prompt) + length]
    return scores_BT
