"""Ends a run that collapses, with a reason and a checkpoint. Reads logs only, so that other trainers can have it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .checks import warn

LEAST_RISE = 0.1
"""Nats a token: smaller rises are noise, however many times a small KL they are."""


class EarlyStopOnCollapse(TrainerCallback):
    """Ends training, with a checkpoint, when the KL has risen again or completions have become short.

    It sees what is logged and nothing else; give it the names under which another trainer logs, such as `kl="kl"` for TRL's
    GRPO. On several processes all must log the same.

    Args:
        max_kl_rise: How many times the lowest mean of `window` logs the KL may be, and at least 0.1 nats above it; > 1.
        min_length_share: Of the mean length of the first `window` logs, what must remain; 0 to 1.
        window: Logs that are averaged.
        kl: Name of the KL in the logs.
        length: Name of the mean length of completions in the logs.

    Raises:
        ValueError: If a bound makes no sense.
    """

    def __init__(
        self,
        max_kl_rise: float = 2.0,
        min_length_share: float = 0.1,
        window: int = 5,
        kl: str = "teacher_kl",
        length: str = "completions/mean_length",
    ) -> None:
        if not max_kl_rise > 1:
            raise ValueError(f"max_kl_rise is {max_kl_rise}: the KL would have to fall all the time. Use more than 1, as 2.")
        if not 0 <= min_length_share < 1:
            raise ValueError(f"min_length_share is {min_length_share}; it is a share of the first length, 0 to 1, as 0.1.")
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1.")
        self.max_kl_rise, self.min_length_share, self.window = max_kl_rise, min_length_share, window
        self.kl, self.length = kl, length
        self.reason: str | None = None
        """Why training was ended; None if it was not."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins with what was logged before a checkpoint."""
        self.reason = None
        self._kls = [entry[self.kl] for entry in state.log_history if self.kl in entry]
        self._lengths = [entry[self.length] for entry in state.log_history if self.length in entry]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Asks for a checkpoint and the end, if it is time."""
        logs = logs or {}
        if self.reason is not None or not {self.kl, self.length} & set(logs):
            return
        for values, name in ((self._kls, self.kl), (self._lengths, self.length)):
            if name in logs:
                values.append(logs[name])
        self.reason = self.rise(self._kls) or self.shrinking(self._lengths)
        if self.reason is not None:
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                warn(f"Training ends after step {state.global_step}: {self.reason}")

    def rise(self, kls: Sequence[float]) -> str | None:
        """What there is to say against the course of the KL."""
        if kls and not math.isfinite(kls[-1]):
            return f"{self.kl} is {kls[-1]}. Look at the last checkpoint before it, and lower the learning rate."
        if len(kls) <= self.window:
            return None
        means = np.convolve(kls, np.full(self.window, 1 / self.window), mode="valid")
        lowest, now = float(means.min()), float(means[-1])
        if now <= self.max_kl_rise * lowest or now - lowest <= LEAST_RISE:
            return None
        return (
            f"{self.kl} has risen to {now:.3g} nats, mean of the last {self.window} logs; its lowest was {lowest:.3g}. Go on "
            "from an earlier checkpoint with a lower learning rate."
        )

    def shrinking(self, lengths: Sequence[float]) -> str | None:
        """What there is to say against the course of the length."""
        if len(lengths) < 2 * self.window:
            return None
        first, now = float(np.mean(lengths[: self.window])), float(np.mean(lengths[-self.window :]))
        if now >= self.min_length_share * first:
            return None
        return (
            f"Completions have {now:.3g} tokens, mean of the last {self.window} logs; {first:.3g} at the beginning. The "
            "student avoids to be scored by ending at once: kl_discount_factor above 0 rewards that, and so may a reward."
        )
