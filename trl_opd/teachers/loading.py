"""From what a user calls a teacher to a `Teacher`, checked against the student."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import check_same_tokens, check_stop_tokens, check_vocab_rows, context_length, policy_vocab_size, warn
from ..config import OnPolicyDistillationConfig, as_dict
from ..models import (
    base_name,
    changed_base,
    check_adapter_kind,
    is_adapter,
    is_quantized,
    load_adapter,
    load_model,
    load_tokenizer,
    next_teacher_adapter,
    rewrites_base,
)
from ..replica import is_url
from .adapter import AdapterTeacher
from .model import ModelTeacher, OffloadedTeacher
from .probe import server_teacher
from .protocol import Teacher
from .self_teacher import make_self_teacher


def make_teacher(
    teacher: str | list[str] | PreTrainedModel | PeftModel,
    student: Callable[[], PreTrainedModel | PeftModel],
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
    prepare: Callable[[nn.Module], nn.Module],
    *,
    may_share_base: bool,
) -> Teacher:
    """Makes the teacher that `teacher` names.

    Args:
        teacher: "base" (the student without its adapter), "self" (the student), an id or path of a model or adapter, or a
            model. An adapter on the student's own base is put on the student's weights where it can be; any other teacher is
            a model of its own. Or the URL of a vLLM server, or a list of those of its replicas.
        student: Gives the student.
        tokenizer: The student's.
        args: The trainer's settings.
        prepare: Puts a model of its own on the training device.
        may_share_base: Whether the student's base is sure to be what its name says. A model that was loaded elsewhere may have
            been changed since, by merging an adapter for one, and keeps its name.

    Raises:
        ValueError: If the teacher cannot score what the student writes.
    """
    urls = server_urls(teacher)
    on_student = isinstance(teacher, str) and teacher in ("base", "self")
    if args.teacher_model_init_kwargs and (urls or on_student or not isinstance(teacher, str)):
        found = f"'{teacher}', which is not loaded at all" if on_student else "loaded already"
        found = "on a server, which loads it itself" if urls else found
        raise ValueError(
            f"teacher_model_init_kwargs is {args.teacher_model_init_kwargs}, but the teacher is {found}. Leave it out, or "
            "pass the teacher's name or path as teacher_model."
        )
    if urls and args.divergence is not None:
        raise ValueError(
            f"kl_granularity is '{args.kl_granularity}', which needs the teacher's whole distribution at each token, but the "
            f"teacher is on a server ({urls[0]}), which sends the log-prob of one. Load the teacher in the training process, "
            "or use kl_granularity='sampled'."
        )
    if urls:
        return server_teacher(urls, student(), tokenizer, args)
    teacher = cast(str | PreTrainedModel | PeftModel, teacher)
    scoring: dict[str, Any] = {
        "temperature": args.temperature,
        "vocab_size": policy_vocab_size(tokenizer),
        "batch_size": args.per_device_train_batch_size,
        "max_tokens": args.max_tokens_per_micro_batch,
    }
    if teacher == "self":
        return make_self_teacher(student, args, context=context_length(student()), **scoring)
    if isinstance(teacher, str) and (teacher == "base" or (may_share_base and _shares_base(teacher, student(), args))):
        name = _put_on_student(teacher, student())
        return AdapterTeacher(student, name, context=context_length(student()), **scoring)
    model = load_teacher(teacher, student(), tokenizer, args)
    scoring["context"] = context_length(model)
    if not args.teacher_offload:
        return ModelTeacher(prepare(model), **scoring)
    if is_quantized(model):
        raise ValueError(
            "teacher_offload is True, but the teacher is quantised, and its weights cannot be moved to and fro. Leave one of "
            "the two out."
        )
    return OffloadedTeacher(prepare(model.cpu()), args.device, **scoring)


def server_urls(teacher: object) -> list[str]:
    """The URLs of the servers that the teacher is on; none if it is on none.

    Raises:
        ValueError: If a list holds anything else.
    """
    if isinstance(teacher, list) and not (teacher and all(map(is_url, teacher))):
        raise ValueError(
            f"teacher_model is the list {teacher}; a list means replicas of one teacher, URLs such as 'http://localhost:8000'."
        )
    return teacher if isinstance(teacher, list) else [teacher] if isinstance(teacher, str) and is_url(teacher) else []


def load_teacher(
    teacher: str | PreTrainedModel | PeftModel,
    student: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
) -> PreTrainedModel | PeftModel:
    """A teacher with weights of its own: loaded if named, and checked."""
    name = teacher if isinstance(teacher, str) else ""
    if isinstance(teacher, str):
        kwargs = {
            "dtype": "auto",
            "trust_remote_code": args.trust_remote_code,
            **as_dict(args.teacher_model_init_kwargs),
        }
        teacher = load_model(teacher, kwargs)
    if isinstance(teacher, PeftModel):
        check_adapter_kind(teacher.peft_config)
    _check_apart(teacher, student)
    check_vocab_rows(teacher, policy_vocab_size(tokenizer), "teacher")
    teacher_tokenizer = load_tokenizer(name, args) if name else _tokenizer_beside(teacher, args)
    if teacher_tokenizer is not None:
        check_same_tokens(tokenizer, teacher_tokenizer)
    check_stop_tokens(student, tokenizer, teacher, teacher_tokenizer)
    return teacher


def _tokenizer_beside(
    teacher: PreTrainedModel | PeftModel, args: OnPolicyDistillationConfig
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder or repository a model came from; None, with a warning, if there is none."""
    name = base_name(teacher)
    try:
        if name:
            return load_tokenizer(name, args)
        reason = "The teacher was made in memory and has no tokenizer on disk"
    except ValueError:
        reason = f"There is no tokenizer in '{name}', where the teacher's weights came from"
    warn(f"{reason}, so that it could not be checked that its ids mean the same tokens as the student's.")
    return None


def _check_apart(teacher: nn.Module, student: nn.Module) -> None:
    """Raises ValueError if training the student would change the teacher."""
    trained = {p.untyped_storage().data_ptr() for p in student.parameters() if p.requires_grad}
    shared = [name for name, p in teacher.named_parameters() if p.untyped_storage().data_ptr() in trained]
    if shared:
        raise ValueError(
            f"{len(shared)} of teacher_model's weights are the very ones of the student that are trained, the first is "
            f"'{shared[0]}', so that the teacher would change with the student. Pass teacher_model='base' to distil from the "
            "student without its adapter, or load the teacher separately."
        )


def _put_on_student(teacher: str, student: PreTrainedModel | PeftModel) -> str | None:
    """Loads a teacher adapter onto the student, frozen; returns its name, or None for the bare base."""
    if not isinstance(student, PeftModel):
        raise ValueError(
            "teacher_model='base' means the student without its adapter, but the student has no adapter: all its weights are "
            "trained, so that none of its base is left. Pass a peft_config, or the base's name as teacher_model."
        )
    if teacher == "base":
        if reason := changed_base(student):
            raise ValueError(
                f"teacher_model='base' means the student without its adapter, but {reason}, so that switching the adapter off "
                "does not give the base back. Pass the base's name as teacher_model: it is then loaded a second time."
            )
        return None
    name = next_teacher_adapter(student)
    load_adapter(student, teacher, name, trainable=False)
    return name


def _shares_base(teacher: str, student: PreTrainedModel | PeftModel, args: OnPolicyDistillationConfig) -> bool:
    """Whether `teacher` is an adapter that can stand beside the student's on the same weights."""
    if not isinstance(student, PeftModel) or args.teacher_model_init_kwargs or not is_adapter(teacher):
        return False
    config = PeftConfig.from_pretrained(teacher)
    same_base = config.base_model_name_or_path == base_name(student)
    same_kind = config.peft_type == student.active_peft_config.peft_type
    return same_base and same_kind and not rewrites_base(config) and changed_base(student) is None
