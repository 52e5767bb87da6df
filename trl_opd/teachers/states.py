"""What an objective over all next tokens needs of teachers: their view of each action token of a forward pass."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ..batch import Rollout, ScoredBatch, TeacherStates
from ..dense import Comparison
from ..divergence import Divergence
from ..layout import Layout
from ..linear_head import Policy
from ..scorers import Divergences
from .in_process import InProcessTeacher
from .protocol import Teacher
from .routing import RoutedTeacher, teacher_numbers, teachers_of


def score_with_states(teacher: Teacher, rollout: Rollout) -> tuple[Tensor, TeacherStates]:
    """(B, T) log-probs, as `Teacher.score` gives them, and the hidden states they came from at action tokens."""
    scores_BT, states = cast(InProcessTeacher | RoutedTeacher, teacher).score_hidden(rollout)
    return scores_BT, TeacherStates(tuple(states), teacher_numbers(teacher, rollout))


def divergences(teacher: Teacher, batch: ScoredBatch, layout: Layout, policy: Policy, divergence: Divergence) -> Divergences:
    """Scores the tokens of `layout`, which is of `batch`, against the teachers; under FSDP all processes must call this."""
    assert batch.states is not None, "the teachers scored without keeping their hidden states"
    numbers_N, parts = layout.places[0], []
    whose_N = batch.states.teacher_B[numbers_N]
    for number, own in enumerate(teachers_of(teacher)):
        tokens_n = (whose_N == number).nonzero().flatten()
        sequences = numbers_N[tokens_n].unique_consecutive().tolist()
        view = cast(InProcessTeacher, own).view([batch.states.by_sequence[sequence] for sequence in sequences])
        assert len(view.hidden) == len(tokens_n), f"{len(view.hidden)} hidden states of a teacher for {len(tokens_n)} tokens"
        parts.append((tokens_n, Comparison(view, divergence, entropy=True)))
    return Divergences(policy, parts)
