"""A teacher that is a model in the training process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def score_rollout(
    model: nn.Module, rollout: Rollout, temperature: float, vocab_size: int, batch_size: int, context: int | None
) -> Tensor:
    """(B, T) log-probs of a rollout's completions under `model`, read after its teacher prompts where it has them; else 0.

    Raises:
        ValueError: If a row is longer than `context`; scores beyond it would be noise.
    """
    ids, attention_mask, completion_mask = _teacher_view(rollout)
    longest = int(attention_mask.sum(dim=1).max())
    if context is not None and longest > context:
        raise ValueError(
            f"The teacher would have to read {longest} tokens (prompt and completion), but its context is {context}. Shorten "
            "the teacher's prompts, or lower max_prompt_length or max_completion_length; if it can read more, set "
            "config.max_position_embeddings."
        )
    scores = score_in_batches(
        model, ids, attention_mask, completion_mask, temperature=temperature, vocab_size=vocab_size, batch_size=batch_size
    )
    return _student_view(scores, rollout)


def _teacher_view(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """What the teacher reads, its own prompts, if any, before the same completions: ids, attention mask, completion mask."""
    ids_BT, starts_B = rollout.ids_BT, rollout.prompt_lengths_B
    if rollout.teacher_prompts is not None:
        pairs = zip(rollout.teacher_prompts, rollout.completion_ids(), strict=True)
        ids_BT = pad_right([prompt + completion for prompt, completion in pairs], 0, torch.long, ids_BT.device)
        starts_B = torch.tensor([len(prompt) for prompt in rollout.teacher_prompts], device=ids_BT.device)
    positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    attention_mask_BT = positions_T < (starts_B + rollout.completion_lengths_B)[:, None]
    return ids_BT, attention_mask_BT, attention_mask_BT & (positions_T >= starts_B[:, None])


def _student_view(scores: Tensor, rollout: Rollout) -> Tensor:
    """Moves the scores of completion tokens from the teacher's positions to the student's."""
    if rollout.teacher_prompts is None:
        return scores
    scores_BT = scores.new_zeros(rollout.ids_BT.shape)
    starts, lengths = rollout.prompt_lengths_B.tolist(), rollout.completion_lengths_B.tolist()
    for row, (start, length, prompt) in enumerate(zip(starts, lengths, rollout.teacher_prompts, strict=True)):
        scores_BT[row, start : start + length] = scores[row, len(prompt) : len(prompt) + length]
    return scores_BT
