"""What every teacher does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..batch import Rollout


class Teacher(Protocol):
    """Scores what the student wrote. A second kind of teacher is a second class with this method."""

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats, no gradient: the value at t is log q(ids[t] | what the teacher has seen before t).

        Values off the action mask are ignored. Where the rollout has `teacher_prompts`, the completion is scored after those.
        """
        ...
