"""Teachers that share the student's base weights: the base itself, or another adapter on it. No second copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Rollout
from ..models import eval_mode
from ..processes import reshard
from .model import score_rollout


class AdapterTeacher:
    """Scores with the student's own weights, its adapter switched off or exchanged for another.

    Args:
        student: Gives the student as it is now, a PeftModel (a trainer may wrap it later).
        adapter_name: The adapter that makes the base the teacher; None for the bare base.
        temperature: That of the rollouts.
        vocab_size: Number of ids the policies range over.
        batch_size: Sequences in a forward pass.
        context: Most tokens the model can read; None for any number.
    """

    def __init__(
        self,
        student: Callable[[], PreTrainedModel | PeftModel],
        adapter_name: str | None,
        *,
        temperature: float,
        vocab_size: int,
        batch_size: int,
        context: int | None = None,
    ) -> None:
        self.student, self.adapter_name = student, adapter_name
        self.temperature, self.vocab_size, self.batch_size, self.context = temperature, vocab_size, batch_size, context

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats; see `Teacher`. The student's adapter, its gradients and its mode are as before, also after an error."""
        student = cast(PeftModel, self.student())
        with _as_teacher(student, self.adapter_name):
            return score_rollout(student, rollout, self.temperature, self.vocab_size, self.batch_size, self.context)


@contextmanager
def _as_teacher(student: PeftModel, adapter_name: str | None) -> Iterator[None]:
    reshard(student)  # weights that a forward pass has gathered are other parameters than those that are trained
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    active, first = student.active_adapters, cast(str, student.active_adapter)  # several may be active
    try:
        if adapter_name is not None:
            student.set_adapter(adapter_name)
        with eval_mode(student), student.disable_adapter() if adapter_name is None else nullcontext():
            yield
    finally:
        reshard(student)
        student.set_adapter(first)
        cast(Any, student.base_model).set_adapter(active)
        student.requires_grad_(False)  # set_adapter and disable_adapter turn on more than was trained
        for parameter in trainable:
            parameter.requires_grad_(True)
