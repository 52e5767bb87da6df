"""The student as its own teacher: as it is now, or as a second adapter on its base that follows its own.

It has something to teach where it sees more than the student does: a `teacher_prompt` with the answer or the documents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import OnPolicyDistillationConfig
from ..models import eval_mode, next_teacher_adapter
from ..processes import reshard
from .adapter import AdapterTeacher
from .in_process import InProcessTeacher
from .protocol import Teacher


class StudentTeacher(InProcessTeacher):
    """Scores with the student as it is when it is asked.

    Args:
        student: Gives the student as it is now.
        scoring: As for `InProcessTeacher`.
    """

    def __init__(self, student: Callable[[], PreTrainedModel | PeftModel], **scoring: Any) -> None:
        super().__init__(**scoring)
        self.student = student

    def weights(self) -> nn.Module | Any:
        """The student."""
        return self.student()

    @contextmanager
    def scoring_model(self) -> Iterator[nn.Module | Any]:
        """Inside, the student in eval mode."""
        student = self.student()
        with eval_mode(student):
            yield student


class SelfTeacher(AdapterTeacher):
    """A frozen adapter beside the student's, at first its copy, which `follow` moves towards it.

    Args:
        student: Gives the student as it is now, a PeftModel.
        adapter_name: That of the teacher's adapter.
        keep: What an update keeps of the teacher, 0 to take over the student's adapter as it is.
        every: Optimizer steps between updates.
        scoring: As for `InProcessTeacher`.
    """

    def __init__(
        self, student: Callable[[], PreTrainedModel | PeftModel], adapter_name: str, *, keep: float, every: int, **scoring: Any
    ) -> None:
        super().__init__(student, adapter_name, **scoring)
        self.keep, self.every = keep, every
        self._move(0.0)

    def follow(self, step: int) -> None:
        """To be called after each optimizer step; `step` are made."""
        if step % self.every == 0:
            self._move(self.keep)

    @torch.no_grad()
    def _move(self, keep: float) -> None:
        for own, students in self._pairs():
            own.copy_(students) if keep == 0 else own.lerp_(students.to(own.dtype), 1 - keep)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter of the teacher's adapter, and that of the student's in its place; under FSDP this process's parts."""
        student = cast(PeftModel, self.student())
        own_name, students_name = cast(str, self.adapter_name), cast(str, student.active_adapter)
        reshard(student)  # weights that a forward pass has gathered are other parameters than those that are trained
        parameters = dict(student.named_parameters())
        for name, parameter in parameters.items():
            if own_name in (parts := name.split(".")):
                twin = parameters[".".join(students_name if part == own_name else part for part in parts)]
                yield _local(parameter), _local(twin)

    def save(self, folder: str, process_index: int) -> None:
        """Writes the adapter into a checkpoint; of a sharded one, each process its part."""
        tensors = [own.cpu().clone() for own, _ in self._pairs()]
        if process_index == 0 or self._sharded():
            torch.save(tensors, _path(folder, process_index))

    @torch.no_grad()
    def load(self, folder: str, process_index: int) -> None:
        """Reads what `save` wrote.

        Raises:
            ValueError: If the checkpoint has none, or one of another adapter or number of processes.
        """
        path = _path(folder, process_index if self._sharded() else 0)
        if not path.is_file():
            raise ValueError(
                f"The teacher is the student's own average or copy, but the checkpoint '{folder}' lacks {path.name}, which "
                "holds it: it was written without teacher_ema and teacher_sync_steps, or its files were not all copied. "
                "Resume with the settings it was written with, or start a new run by passing the folder as `model`."
            )
        saved, pairs = torch.load(path, weights_only=True), list(self._pairs())
        if [tensor.shape for tensor in saved] != [own.shape for own, _ in pairs]:
            raise ValueError(
                f"{path} holds a teacher of {len(saved)} tensors whose shapes are not those of the student's adapter, or it "
                "was written by another number of processes. Resume with the peft_config and processes it was written with."
            )
        for (own, _), tensor in zip(pairs, saved, strict=True):
            own.copy_(tensor)

    def _sharded(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self.student().parameters())


def make_self_teacher(
    student: Callable[[], PreTrainedModel | PeftModel], args: OnPolicyDistillationConfig, **scoring: Any
) -> Teacher:
    """The student as it is, or, with `teacher_ema` or `teacher_sync_steps`, an adapter that follows its own.

    Raises:
        ValueError: If it is to follow, but the student does not train exactly one adapter.
    """
    if args.teacher_ema is None and args.teacher_sync_steps is None:
        return StudentTeacher(student, **scoring)
    model = student()
    if not isinstance(model, PeftModel) or len(model.active_adapters) != 1:
        found = f"{len(model.active_adapters)} active adapters" if isinstance(model, PeftModel) else "no adapter"
        raise ValueError(
            "teacher_ema and teacher_sync_steps keep a second copy of the student's adapter as the teacher, but the student "
            f"has {found}. Pass a peft_config, or leave both out: then the teacher is the student as it is."
        )
    trained = [n for n, p in model.named_parameters() if p.requires_grad and model.active_adapter not in n.split(".")]
    if trained:
        raise ValueError(
            f"The teacher would be a second adapter on the student's base, but {len(trained)} weights of that base are "
            f"trained, the first is '{trained[0]}', so that the teacher would change with them. Train the adapter only."
        )
    config = copy.deepcopy(model.active_peft_config)
    config.inference_mode = True
    if "init_lora_weights" in config.to_dict():
        setattr(config, "init_lora_weights", True)  # noqa: B010 - a LoraConfig's; others, as PiSSA, would change the base again
    model.add_adapter(name := next_teacher_adapter(model), config)
    return SelfTeacher(student, name, keep=args.teacher_ema or 0.0, every=args.teacher_sync_steps or 1, **scoring)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _path(folder: str, process_index: int) -> Path:
    return Path(folder) / f"self_teacher_{process_index}.pt"
