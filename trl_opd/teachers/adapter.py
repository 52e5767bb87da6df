"""Teachers that share the student's base weights: the base itself, or another adapter on it. No second copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..models import eval_mode
from ..processes import reshard
from .in_process import InProcessTeacher


class AdapterTeacher(InProcessTeacher):
    """Scores with the student's own weights, its adapter switched off or exchanged for another.

    Args:
        student: Gives the student as it is now, a PeftModel (a trainer may wrap it later).
        adapter_name: The adapter that makes the base the teacher; None for the bare base.
        scoring: As for `InProcessTeacher`.
    """

    def __init__(self, student: Callable[[], PreTrainedModel | PeftModel], adapter_name: str | None, **scoring: Any) -> None:
        super().__init__(**scoring)
        self.student, self.adapter_name = student, adapter_name

    def weights(self) -> nn.Module | Any:
        """The student: its head is the teacher's, too."""
        return self.student()

    @contextmanager
    def scoring_model(self) -> Iterator[nn.Module | Any]:
        """Inside, the student as the teacher; afterwards its adapter, its gradients and its mode are as before."""
        student = cast(PeftModel, self.student())
        with _as_teacher(student, self.adapter_name):
            yield student


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
