"""From what a user calls a teacher to a `Teacher`, checked against the student."""

from __future__ import annotations

from collections.abc import Callable

from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import check_same_tokens, check_stop_tokens, check_vocab_rows, policy_vocab_size, stop_token_ids, warn
from ..config import OnPolicyDistillationConfig
from ..models import TEACHER_ADAPTER, as_dict, base_name, is_adapter, load_adapter, load_model, load_tokenizer
from .adapter import AdapterTeacher
from .model import ModelTeacher


def make_teacher(
    teacher: str | PreTrainedModel | PeftModel,
    student: Callable[[], PreTrainedModel | PeftModel],
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
    prepare: Callable[[nn.Module], nn.Module],
) -> AdapterTeacher | ModelTeacher:
    """Makes the teacher that `teacher` names.

    Args:
        teacher: "base" (the student without its adapter), an id or path of a model or adapter, or a model. An adapter on the
            student's own base is put on the student's weights; any other teacher is a model of its own.
        student: Gives the student.
        tokenizer: The student's.
        args: The trainer's settings.
        prepare: Puts a model of its own on the training device.

    Raises:
        ValueError: If the teacher cannot score what the student writes.
    """
    scoring = {
        "temperature": args.temperature,
        "vocab_size": policy_vocab_size(tokenizer),
        "batch_size": args.per_device_train_batch_size,
    }
    if isinstance(teacher, str) and (teacher == "base" or _shares_base(teacher, student())):
        return AdapterTeacher(student, _put_on_student(teacher, student()), **scoring)
    model = load_teacher(teacher, student(), tokenizer, args)
    return ModelTeacher(prepare(model), **scoring)


def load_teacher(
    teacher: str | PreTrainedModel | PeftModel,
    student: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
) -> PreTrainedModel | PeftModel:
    """A teacher with weights of its own: loaded if named, and checked."""
    if isinstance(teacher, str):
        name = teacher
        kwargs = {
            "dtype": "auto",
            "trust_remote_code": args.trust_remote_code,
            **as_dict(args.teacher_model_init_kwargs),
        }
        teacher = load_model(teacher, kwargs)
    else:
        name = base_name(teacher)
    if _base(teacher) is _base(student):
        raise ValueError(
            "teacher_model is the very model that is trained, so that the teacher would change with the student. Pass "
            "teacher_model='base' to distil from the student without its adapter, or load the teacher separately."
        )
    check_vocab_rows(teacher, policy_vocab_size(tokenizer), "teacher")
    teacher_tokenizer = load_tokenizer(name, args) if name else None
    if teacher_tokenizer is None:
        warn(
            "The teacher was made in memory and has no tokenizer on disk, so that it could not be checked that its ids mean the "
            "same tokens as the student's."
        )
    else:
        check_same_tokens(tokenizer, teacher_tokenizer)
    stops = stop_token_ids(teacher, teacher_tokenizer or tokenizer)
    check_stop_tokens(stop_token_ids(student, tokenizer), stops, tokenizer)
    return teacher


def _put_on_student(teacher: str, student: PreTrainedModel | PeftModel) -> str | None:
    """Loads a teacher adapter onto the student, frozen; returns its name, or None for the bare base."""
    if not isinstance(student, PeftModel):
        raise ValueError(
            "teacher_model='base' means the student without its adapter, but the student has no adapter: all its weights are "
            "trained, so that none of its base is left. Pass a peft_config, or the base's name as teacher_model."
        )
    if teacher == "base":
        return None
    load_adapter(student, teacher, TEACHER_ADAPTER, trainable=False)
    return TEACHER_ADAPTER


def _shares_base(teacher: str, student: PreTrainedModel | PeftModel) -> bool:
    if not isinstance(student, PeftModel) or not is_adapter(teacher):
        return False
    return PeftConfig.from_pretrained(teacher).base_model_name_or_path == base_name(student)


def _base(model: PreTrainedModel | PeftModel) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model
