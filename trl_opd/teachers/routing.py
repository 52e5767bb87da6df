"""Several teachers: each row is scored by the one its `teacher` column names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch import Rollout, check_shape
from ..checks import TeacherModel
from ..config import OnPolicyDistillationConfig, as_dict
from ..models import base_name, teacher_adapters
from .in_process import InProcessTeacher
from .loading import make_teacher
from .model import OffloadedTeacher
from .protocol import Teacher
from .self_teacher import SelfTeacher
from .server import ServerTeacher

COLUMN = "teacher"


class RoutedTeacher:
    """Scores each row with its own teacher.

    Args:
        teachers: By name; a teacher may have several names.
        most: The greatest of each number over the processes. Given if the models are sharded: then a forward pass is one of
            all processes, also of those that have no row for it. All processes call it in each `score`, but where all
            teachers are servers, which one process may ask alone.
    """

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        *,
        most: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self.teachers, self.most = dict(teachers), most

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats; see `Teacher`.

        Raises:
            ValueError: If a row names no teacher, or scores do not belong to the rows they were made for.
        """
        return self._ask(rollout, lambda teacher, part: (teacher.score(part), []))[0]

    def score_hidden(self, rollout: Rollout) -> tuple[Tensor, list[Tensor]]:
        """See `InProcessTeacher`, as all the teachers must be."""
        return self._ask(rollout, lambda teacher, part: cast(InProcessTeacher, teacher).score_hidden(part))

    def _ask(
        self, rollout: Rollout, ask: Callable[[Teacher, Rollout], tuple[Tensor, list[Tensor]]]
    ) -> tuple[Tensor, list[Tensor]]:
        parts = list(self._parts(rollout))
        asked_here = [int(where_B.any()) for _, where_B in parts]
        in_process = any(isinstance(teacher, InProcessTeacher) for teacher in self.teachers.values())
        asked_anywhere = self.most(asked_here) if self.most is not None and in_process else asked_here
        scores_BT = rollout.sampled_logps_BT.new_zeros(rollout.ids_BT.shape)
        states: dict[int, Tensor] = {}
        for (teacher, where_B), here, anywhere in zip(parts, asked_here, asked_anywhere, strict=True):
            part = rollout[where_B]
            stub = anywhere > here and isinstance(teacher, InProcessTeacher)
            asked = part.with_stub() if stub else part
            if len(asked):
                found_BT, found_states = ask(teacher, asked)
                check_shape("A teacher's scores of its rows", found_BT, asked.ids_BT)
                scores_BT = scores_BT.to(torch.promote_types(scores_BT.dtype, found_BT.dtype))
                scores_BT[where_B] = found_BT[: len(part)].to(scores_BT.dtype)
                states |= dict(zip(where_B.nonzero().flatten().tolist(), found_states, strict=False))  # but the stub's
        return scores_BT, [states[number] for number in sorted(states)]

    def rows_of(self, rollout: Rollout) -> dict[str, Tensor]:
        """(B,) masks by the teachers' names: whose row it is."""
        names = [row.get(COLUMN) for row in rollout.rows]
        if unknown := {str(name) for name in names} - set(self.teachers):
            raise ValueError(
                f"Rows name the teachers {sorted(unknown)} in their '{COLUMN}' column, but there are {sorted(self.teachers)} "
                "only. Each row is scored by its own teacher: give both the same names."
            )
        return {name: torch.tensor([own == name for own in names], device=rollout.ids_BT.device) for name in self.teachers}

    def _parts(self, rollout: Rollout) -> Iterable[tuple[Teacher, Tensor]]:
        """Each teacher once, however many names it has, with its rows; in the same order on all processes.

        Servers come last: if one is lost to this process, it has made the passes that others wait for.
        """
        parts: dict[int, tuple[Teacher, Tensor]] = {}
        for name, where_B in self.rows_of(rollout).items():
            teacher = self.teachers[name]
            before = parts.get(id(teacher))
            parts[id(teacher)] = (teacher, where_B if before is None else before[1] | where_B)
        return sorted(parts.values(), key=lambda part: not isinstance(part[0], InProcessTeacher))


def make_teachers(
    given: TeacherModel | dict[str, TeacherModel],
    student: Callable[[], PreTrainedModel | PeftModel],
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
    prepare: Callable[[nn.Module], nn.Module],
    *,
    may_share_base: bool,
    most: Callable[[list[int]], list[int]] | None = None,
) -> Teacher:
    """The teacher that scores every row, or of a dict, one that asks the right one for each.

    Args:
        given: One teacher, or several by name; see `make_teacher`. The same one twice is loaded once.
        student: Gives the student.
        tokenizer: The student's.
        args: The trainer's settings.
        prepare: Puts a model of its own on the training device.
        may_share_base: Whether the student's base is sure to be what its name says.
        most: See `RoutedTeacher`.

    Raises:
        ValueError: If a teacher cannot score what the student writes, or a setting is of no use to any.
    """
    for name in teacher_adapters(student()):  # an earlier trainer's
        student().delete_adapter(name)
    several = given if isinstance(given, dict) else {"": given}
    if not several:
        raise ValueError("teacher_model is an empty dict. Give it a teacher for each dataset, or for each value of 'teacher'.")
    if "p99" in several:
        raise ValueError("A teacher has the name of a metric, teacher_kl/p99. Call it, and its dataset, something else.")
    made: dict[Any, Teacher] = {}
    by_name: dict[str, Teacher] = {}
    for name, teacher in several.items():
        own = _args_of(name, several, args)
        key = teacher if isinstance(teacher, str) else id(teacher), str(own.teacher_model_init_kwargs)
        if key not in made:
            made[key] = make_teacher(teacher, student, tokenizer, own, prepare, may_share_base=may_share_base)
        by_name[name] = made[key]
    _check_used(list(made.values()), args)
    if isinstance(given, dict):
        return RoutedTeacher(by_name, most=most)
    return by_name[""]


def name_of(given: TeacherModel | dict[str, TeacherModel], made: Teacher) -> str | dict[str, str]:
    """Id, path or URL (with the served name) of the teacher, empty if it was made in memory; of several, by name."""
    if isinstance(given, dict):
        return {name: cast(str, name_of(given[name], own)) for name, own in named_teachers(made).items()}
    if isinstance(made, ServerTeacher):
        return made.name
    return given if isinstance(given, str) else base_name(cast(PreTrainedModel | PeftModel, given))


def rows_by_teacher(teacher: Teacher, rollout: Rollout) -> dict[str, Tensor]:
    """(B,) masks by the teachers' names: whose row it is. One teacher has the name "" and all rows."""
    if isinstance(teacher, RoutedTeacher):
        return teacher.rows_of(rollout)
    return {"": torch.ones(len(rollout), dtype=torch.bool, device=rollout.ids_BT.device)}


def named_teachers(teacher: Teacher) -> dict[str, Teacher]:
    """The teachers that score, by name; one teacher has the name ""."""
    return teacher.teachers if isinstance(teacher, RoutedTeacher) else {"": teacher}


def teachers_of(teacher: Teacher) -> list[Teacher]:
    """The teachers that score, each once."""
    return list({id(one): one for one in named_teachers(teacher).values()}.values())


def teacher_numbers(teacher: Teacher, rollout: Rollout) -> Tensor:
    """(B,) whose each row is: its place in `teachers_of(teacher)`."""
    number_of = {id(one): number for number, one in enumerate(teachers_of(teacher))}
    numbers_B = torch.zeros(len(rollout), dtype=torch.long, device=rollout.ids_BT.device)
    for name, where_B in rows_by_teacher(teacher, rollout).items():
        numbers_B[where_B] = number_of[id(named_teachers(teacher)[name])]
    return numbers_B


def _args_of(name: str, several: dict[str, TeacherModel], args: OnPolicyDistillationConfig) -> OnPolicyDistillationConfig:
    """The settings for one of several teachers: `teacher_model_init_kwargs` under its name, or else those of all it suits."""
    kwargs, teacher = as_dict(args.teacher_model_init_kwargs), several[name]
    if not kwargs or (len(several) == 1 and name not in kwargs):
        return args
    loaded = isinstance(teacher, str) and teacher not in ("base", "self") and "://" not in teacher
    own = copy.copy(args)
    own.teacher_model_init_kwargs = kwargs.get(name) if set(kwargs) <= set(several) else kwargs if loaded else None
    return own


def _check_used(teachers: list[Teacher], args: OnPolicyDistillationConfig) -> None:
    """Raises ValueError for a setting that no teacher heeds."""
    if args.teacher_offload and not any(isinstance(teacher, OffloadedTeacher) for teacher in teachers):
        raise ValueError(
            "teacher_offload is True, but no teacher has weights of its own in this process: there is nothing to keep in CPU "
            "memory. Leave it out."
        )
    follows = {name: value for name in ("teacher_ema", "teacher_sync_steps") if (value := getattr(args, name)) is not None}
    if follows and not any(isinstance(teacher, SelfTeacher) for teacher in teachers):
        raise ValueError(
            f"{follows} says how a teacher follows the student, but no teacher is 'self'. Pass teacher_model='self', or leave "
            "it out."
        )
