"""What teachers in the training process share: a model that scores, read after the teacher's own prompts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Rollout, pad_right
from ..logprobs import score_in_batches, top_tokens


class InProcessTeacher:
    """A teacher whose scores are forward passes of this process.

    Args:
        temperature: That of the rollouts: student and teacher are compared at the same one.
        vocab_size: Number of ids the policies range over.
        batch_size: Sequences in a forward pass, as long as the longest; of shorter ones it may be more.
        max_tokens: Tokens in a forward pass, in place of that.
        context: Most tokens the model can read; None for any number.
    """

    def __init__(
        self,
        *,
        temperature: float,
        vocab_size: int,
        batch_size: int,
        max_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        self.temperature, self.vocab_size, self.context = temperature, vocab_size, context
        self.batch_size, self.max_tokens = batch_size, max_tokens

    def scoring_model(self) -> AbstractContextManager[nn.Module | Any]:
        """Inside, the model to call; afterwards all is as before, also after an error."""
        raise NotImplementedError

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) log-probs of completions, read after the teacher's own prompts where it has them; see `Teacher`.

        Raises:
            ValueError: If a row is longer than `context`; scores beyond it would be noise.
        """
        ids, attention_mask, completion_mask = _teacher_view(rollout)
        longest = int(attention_mask.sum(dim=1).max())
        if self.context is not None and longest > self.context:
            raise ValueError(
                f"The teacher would have to read {longest} tokens (prompt and completion), but its context is {self.context}. "
                "Shorten the teacher's prompts, or lower max_prompt_length or max_completion_length; if it can read more, set "
                "config.max_position_embeddings."
            )
        with self.scoring_model() as model:
            scores = score_in_batches(
                model,
                ids,
                attention_mask,
                completion_mask,
                temperature=self.temperature,
                vocab_size=self.vocab_size,
                batch_size=self.batch_size,
                max_tokens=self.max_tokens,
            )
        return _student_view(scores, rollout)

    def top(self, rollout: Rollout, k: int) -> tuple[Tensor, Tensor]:
        """What the teacher would rather have written: two (B, T, k), ids and nats, likeliest first; 0 off the completions."""
        ids, attention_mask, _ = _teacher_view(rollout)
        with self.scoring_model() as model:
            parts = top_tokens(model, ids, attention_mask, k, temperature=self.temperature, vocab_size=self.vocab_size)
        top_ids, top_logps = (torch.stack([_student_view(c, rollout) for c in part.unbind(-1)], dim=-1) for part in parts)
        return top_ids, top_logps


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
