"""Training and evaluation data as the user gives them -> what the trainer reads, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import datasets

from . import checks
from .config import OnPolicyDistillationConfig
from .mixing import DATASET, TEACHER, NamedRows, make_mixture
from .prompts import PromptEncoder, check_dataset
from .rows import repeat_rows
from .teacher_prompts import TeacherPromptEncoder


def prepare_train(
    dataset: Any,
    encoder: PromptEncoder,
    own: TeacherPromptEncoder,
    teachers: Collection[str],
    args: OnPolicyDistillationConfig,
) -> datasets.Dataset | datasets.IterableDataset | NamedRows:
    """The training data, checked; long prompts dropped if so configured; a stream's rows repeated into groups.

    Args:
        dataset: A dataset, or a dict of them, which are mixed.
        encoder: Encodes prompts as the student sees them.
        own: As the teacher sees them.
        teachers: Names of the teachers; none if one teacher scores all rows.
        args: The trainer's settings.

    Raises:
        ValueError: If something does not fit; the message says what.
    """
    if isinstance(dataset, dict):
        return _mixed(dataset, encoder, own, teachers, args)
    if args.prompts_per_step:
        raise ValueError(
            f"prompts_per_step is {args.prompts_per_step}, but train_dataset is one dataset. Pass a dict of datasets with "
            "these names, or leave it out."
        )
    dataset = _checked(dataset, "train_dataset", encoder, own, args)
    if teachers:
        _check_teacher_column(dataset, "train_dataset", teachers, every=True)
    if isinstance(dataset, datasets.IterableDataset):
        checks.check_stream_groups(args, args.world_size)
        return repeat_rows(dataset, args.num_generations)
    checks.check_step_has_rows(len(dataset), args, args.world_size)
    return dataset


def _mixed(
    parts: dict[str, Any],
    encoder: PromptEncoder,
    own: TeacherPromptEncoder,
    teachers: Collection[str],
    args: OnPolicyDistillationConfig,
) -> NamedRows:
    if not parts:
        raise ValueError("train_dataset is an empty dict; there is no prompt to distil on.")
    for name, part in parts.items():
        role = f"train_dataset['{name}']"
        if name == "p99":  # teacher_kl/p99 is a quantile
            raise ValueError(f"{role} has the name of a metric, teacher_kl/p99. Call it something else.")
        if isinstance(part, datasets.IterableDataset):
            raise ValueError(
                f"{role} is a stream, of which it is not known how many prompts it has to be mixed. Mix streams with "
                f"datasets.interleave_datasets, each with a '{TEACHER}' column if it has a teacher of its own."
            )
        if DATASET in check_dataset(part, role).column_names:
            raise ValueError(f"{role} has a column '{DATASET}', which is to hold the dataset's name. Rename it.")
    parts = {name: _checked(part, f"train_dataset['{name}']", encoder, own, args) for name, part in parts.items()}
    if teachers:
        named = {name for part in parts.values() if TEACHER in part.column_names for name in part.unique(TEACHER)}
        named |= {name for name, part in parts.items() if TEACHER not in part.column_names}
        _check_names(named, f"The datasets of train_dataset ({sorted(parts)})", teachers, every=True)
    mixed = NamedRows(parts, [DATASET, TEACHER] if teachers else [DATASET])
    make_mixture(mixed.sizes, args)
    return mixed


def prepare_eval(dataset: Any, own: TeacherPromptEncoder, teachers: Collection[str]) -> Any:
    """The evaluation data, checked; where there are several teachers, each row has the name of its own."""
    if dataset is None:
        return None
    if not isinstance(dataset, dict):
        _first_prompt(check_dataset(dataset, "eval_dataset"), own)
        if teachers:
            _check_teacher_column(dataset, "eval_dataset", teachers)
        return dataset
    return {name: _named_eval(name, part, own, teachers) for name, part in dataset.items()}


def _named_eval(name: str, part: Any, own: TeacherPromptEncoder, teachers: Collection[str]) -> Any:
    role = f"eval_dataset['{name}']"
    _first_prompt(check_dataset(part, role), own)
    if not teachers:
        return part
    if TEACHER in (part.column_names or []):
        _check_teacher_column(part, role, teachers)
        return part
    _check_names({name}, role, teachers)
    if isinstance(part, datasets.IterableDataset):
        return part.map(lambda row: {TEACHER: name, **row})
    return NamedRows({name: part}, [TEACHER])


def _checked(dataset: Any, role: str, encoder: PromptEncoder, own: TeacherPromptEncoder, args: Any) -> Any:
    dataset = check_dataset(dataset, role)
    if args.long_prompts == "drop":
        dataset = checks.drop_long_prompts(dataset, encoder)
    _first_prompt(dataset, own)
    return dataset


def _first_prompt(dataset: Any, own: TeacherPromptEncoder) -> None:
    """Encodes one prompt for the teacher, so that what cannot be is told now and not after the first rollout."""
    if isinstance(dataset, datasets.Dataset) and len(dataset):
        own.encode_row(dataset[0])


def _check_teacher_column(dataset: Any, role: str, teachers: Collection[str], *, every: bool = False) -> None:
    """Of a stream only that it is there: its rows are checked as they come."""
    columns = dataset.column_names
    if columns is not None and TEACHER not in columns:
        raise ValueError(
            f"There are several teachers, {sorted(teachers)}, but {role} has no '{TEACHER}' column that says which of them "
            f"scores a row; it has {columns}. Add one, or pass a dict of datasets with the teachers' names."
        )
    if isinstance(dataset, datasets.Dataset):
        _check_names(set(dataset.unique(TEACHER)), f"The '{TEACHER}' column of {role}", teachers, every=every)


def _check_names(found: set[Any], where: str, teachers: Collection[str], *, every: bool = False) -> None:
    """Raises ValueError for names that are no teacher's and, if `every`, for teachers without rows."""
    if unknown := sorted(map(str, found - set(teachers))):
        raise ValueError(
            f"{where} asks for the teachers {unknown}, but teacher_model has {sorted(teachers)} only. Each row is scored by "
            "its own teacher: give both the same names."
        )
    if every and (idle := sorted(set(teachers) - found)):
        raise ValueError(f"{where} has no row for the teachers {idle} of teacher_model. Leave them out, or add their rows.")
