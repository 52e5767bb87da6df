"""What a rollout before the first update tells of student and teacher: whether they fit, in figures and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .advantage import reverse_kl
from .batch import Rollout

EVIDENCE = 200
"""Tokens below which a rollout proves nothing but that student and teacher are the same."""
FAR = 5.0
"""Nats a token by which two models that fit seldom differ on average."""
SHORT = 32
"""Tokens below which a completion cannot be said to repeat itself."""


@dataclass(frozen=True)
class Comparison:
    """Figures of completions the student wrote and the teacher scored. Log-probs and KL are means in nats a token."""

    completions: int
    tokens: int
    vocab_size: int
    teacher_kl: float
    teacher_kl_abs: float
    teacher_logp: float
    first_kl: float
    """Of the first token of each completion."""
    first_teacher_logp: float
    stop_kl: float | None
    """Of the stop tokens; None if no completion has ended."""
    stop_teacher_logp: float | None
    inner_kl: float
    """Of all other tokens."""
    truncated_fraction: float
    repeated_fraction: float
    """Completions of at least `SHORT` tokens of whose 4-grams less than a third are distinct."""
    top1pct_share: float
    """Of the sum of |student - teacher log-prob|, what the hundredth of the tokens with the greatest has."""

    def verdicts(self, max_completion_length: int, *, half_precision: bool) -> list[str]:
        """What is probably wrong, and what to do about it; empty if nothing is."""
        rounding = 0.05 if half_precision else 1e-3  # equal models differ by 0.04 in bf16 (SmolLM2-135M), by 1e-6 in fp32
        if self.tokens and self.teacher_kl_abs < rounding:
            return [
                f"teacher_kl is {self.teacher_kl:.1e} nats a token before the first update: the teacher scores as the student "
                "does. Is it the model you meant, and did its weights or adapter load? (A new adapter with "
                "teacher_model='base' starts here too, and 'self' where it sees the student's prompt: student and teacher are "
                "then the same.)"
            ]
        if self.tokens < EVIDENCE:
            return []
        guessing = self.teacher_logp < -0.9 * math.log(self.vocab_size)
        about_teacher = [self._no_better_than_guessing()] if guessing else [*self._beginning(), *self._end()]
        return [*about_teacher, *self._few_tokens(), *self._length(max_completion_length)]

    def _no_better_than_guessing(self) -> str:
        return (
            f"The teacher's mean log-prob is {self.teacher_logp:.1f}, no better than guessing among {self.vocab_size} ids "
            f"(-ln V = {-math.log(self.vocab_size):.1f}). Its weights did not load, its ids mean other tokens, or it reads "
            "another prompt than you think."
        )

    def _beginning(self) -> list[str]:
        if self.first_kl < FAR or self.first_kl < 3 * self.inner_kl:
            return []
        return [
            f"The teacher gives the first token of a completion a log-prob of {self.first_teacher_logp:.1f} on average, "
            f"{self.first_kl:.1f} nats less than the student; others differ by {self.inner_kl:.1f}. It expects an answer "
            "to begin otherwise: most often its chat template differs (another header, a <think> block). Give it its own "
            "prompt (teacher_chat_template), or set chat_template_kwargs."
        ]

    def _end(self) -> list[str]:
        if self.stop_kl is None or self.stop_teacher_logp is None or self.stop_kl < FAR or self.stop_kl < 3 * self.inner_kl:
            return []
        return [
            f"Where the student ends, the teacher gives the stop token a log-prob of {self.stop_teacher_logp:.1f}, "
            f"{self.stop_kl:.1f} nats less than the student; other tokens differ by {self.inner_kl:.1f}. It ends its answers "
            "with another token, and the student would learn never to stop. Compare tokenizer.eos_token and chat templates."
        ]

    def _few_tokens(self) -> list[str]:
        if self.tokens < 1000 or self.top1pct_share < 0.5:
            return []
        return [
            f"A hundredth of the tokens carries {self.top1pct_share:.0%} of all |advantages|: the rest will hardly be heard. "
            "Look at them with log_completions=True; kl_clip (10, say) bounds what each of them weighs."
        ]

    def _length(self, max_completion_length: int) -> list[str]:
        found = []
        if self.truncated_fraction > 0.5 and self.repeated_fraction <= 0.5:
            found.append(
                f"{self.truncated_fraction:.0%} of the completions were cut at {max_completion_length} tokens: the student "
                "never gets to learn how they end. Raise max_completion_length, if that is not what you want."
            )
        if self.repeated_fraction > 0.5:
            found.append(
                f"{self.repeated_fraction:.0%} of the completions repeat themselves, {self.truncated_fraction:.0%} were cut "
                f"at {max_completion_length} tokens. A longer limit would not help: is the student an instruction model, with "
                "its own chat template, and does it know its stop token?"
            )
        return found


def compare(rollout: Rollout, teacher_logps_BT: Tensor, vocab_size: int) -> Comparison:
    """The figures of a rollout, of this process's share.

    Args:
        rollout: What the student wrote, before the first update.
        teacher_logps_BT: (B, T) nats.
        vocab_size: Number of ids the policies range over.
    """
    mask_BT = rollout.mask_BT
    kl_BT = reverse_kl(rollout.sampled_logps_BT, teacher_logps_BT, mask_BT)
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    ends_B = rollout.prompt_lengths_B + rollout.completion_lengths_B - 1
    first_BT = mask_BT & (position_T == rollout.prompt_lengths_B[:, None])
    stop_BT = mask_BT & (position_T == ends_B[:, None]) & rollout.stopped_B[:, None] & ~first_BT
    stops = int(stop_BT.sum())
    ids = [row for row, real in zip(rollout.completion_ids(), rollout.real_B.tolist(), strict=True) if real]
    sizes = kl_BT[mask_BT].abs().sort(descending=True).values
    return Comparison(
        completions=len(ids),
        tokens=int(mask_BT.sum()),
        vocab_size=vocab_size,
        teacher_kl=_mean(kl_BT, mask_BT),
        teacher_kl_abs=_mean(kl_BT.abs(), mask_BT),
        teacher_logp=_mean(teacher_logps_BT, mask_BT),
        first_kl=_mean(kl_BT, first_BT),
        first_teacher_logp=_mean(teacher_logps_BT, first_BT),
        stop_kl=_mean(kl_BT, stop_BT) if stops else None,
        stop_teacher_logp=_mean(teacher_logps_BT, stop_BT) if stops else None,
        inner_kl=_mean(kl_BT, mask_BT & ~first_BT & ~stop_BT),
        truncated_fraction=float((~rollout.stopped_B)[rollout.real_B].float().mean()) if ids else 0.0,
        repeated_fraction=sum(_repeats(row) for row in ids) / max(1, len(ids)),
        top1pct_share=float(sizes[: max(1, len(sizes) // 100)].sum() / sizes.sum().clamp(min=1e-12)),
    )


def _mean(values_BT: Tensor, where_BT: Tensor) -> float:
    chosen = values_BT[where_BT]
    return float(chosen.mean()) if chosen.numel() else 0.0


def _repeats(ids: list[int]) -> bool:
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(ids) >= SHORT and len(set(grams)) < len(grams) / 3
