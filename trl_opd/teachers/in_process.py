"""What teachers in the training process share: a model that scores, read after the teacher's own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..batch import Rollout, pad_right
from ..dense import TeacherView
from ..last_layer import PROBE_TOKENS, is_linear, known_head
from ..linear_head import LogitRule, Policy
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

    def weights(self) -> nn.Module | Any:
        """The model, as it is between scorings."""
        raise NotImplementedError

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) log-probs of completions, read after the teacher's own prompts where it has them; see `Teacher`.

        Raises:
            ValueError: If a row is longer than `context`; scores beyond it would be noise.
        """
        return self._score(rollout, None)

    def score_hidden(self, rollout: Rollout) -> tuple[Tensor, list[Tensor]]:
        """`score` and, for each sequence, what the head got before each action token: (n, K), in the head's precision.

        Raises:
            ValueError: Also if the head is none that `view` can use.
        """
        found: dict[int, Tensor] = {}
        scores_BT = self._score(rollout, found)
        width = self._head()[0].in_features
        dtype = next((states.dtype for states in found.values()), torch.float32)
        states = []
        for number, start in enumerate(rollout.prompt_lengths_B.tolist()):
            actions = rollout.mask_BT[number, start : start + int(rollout.completion_lengths_B[number])]
            own = found.get(number)
            states.append(scores_BT.new_zeros(0, width, dtype=dtype) if own is None else own[actions])
        return scores_BT, states

    def view(self, states: Sequence[Tensor]) -> TeacherView:
        """What the teacher thinks where it had these hidden states, (n, K) each; under FSDP all processes must call this."""
        head, rule = self._head()
        device = states[0].device if states else None
        weight, bias = (None if p is None else _whole(p).to(device or p.device) for p in (head.weight, head.bias))
        assert weight is not None
        hidden = torch.cat(list(states)) if states else weight.new_zeros(0, head.in_features)
        return TeacherView.linear(hidden, weight, bias, Policy(self.temperature, self.vocab_size, rule), hidden.dtype)

    def _head(self) -> tuple[nn.Linear, LogitRule]:
        model = self.weights()
        device = next(model.parameters()).device
        known = known_head(model, torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device))
        if known is None or not is_linear(known[0]) or known[0].weight.requires_grad:
            what = "is trained or adapted" if known is not None else "does more than multiply, scale and cap"
            raise ValueError(
                f"The teacher's head {what}, so that its distribution cannot be told from its hidden states, which "
                "kl_granularity 'topk' and 'full' need. Use kl_granularity='sampled', or a teacher with a plain, frozen head."
            )
        return cast(nn.Linear, known[0]), known[1]

    def _score(self, rollout: Rollout, hidden: dict[int, Tensor] | None) -> Tensor:
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
                hidden=hidden,
            )
        return _student_view(scores, rollout)

    def top(self, rollout: Rollout, k: int) -> tuple[Tensor, Tensor]:
        """What the teacher would rather have written: two (B, T, k), ids and nats, likeliest first; 0 off the completions."""
        ids, attention_mask, _ = _teacher_view(rollout)
        with self.scoring_model() as model:
            parts = top_tokens(model, ids, attention_mask, k, temperature=self.temperature, vocab_size=self.vocab_size)
        top_ids, top_logps = (torch.stack([_student_view(c, rollout) for c in part.unbind(-1)], dim=-1) for part in parts)
        return top_ids, top_logps


def _whole(parameter: Tensor) -> Tensor:
    """A sharded one gathered."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


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
