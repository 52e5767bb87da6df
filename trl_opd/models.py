"""Student and teacher models: loading, adapters, the modes they are used in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import (
    PeftConfig,
    PeftModel,
    PromptLearningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from .config import OnPolicyDistillationConfig

TEACHER_ADAPTER = "teacher"
"""Name of the adapter a teacher has on the student's base."""


def load_student(
    model: str | PreTrainedModel | PeftModel,
    args: OnPolicyDistillationConfig,
    quantization_config: QuantizationConfigMixin | None,
    peft_config: PeftConfig | None,
) -> PreTrainedModel | PeftModel:
    """The model to train: loaded if it is given by name, wrapped in `peft_config`'s adapter, its dropout switched off.

    Raises:
        ValueError: If the arguments contradict each other or leave nothing to train.
    """
    if isinstance(model, str):
        kwargs = {"dtype": "float32", "trust_remote_code": args.trust_remote_code, **as_dict(args.model_init_kwargs)}
        if quantization_config is not None:
            kwargs["quantization_config"] = quantization_config
        model = load_model(model, kwargs, trainable_adapter=True)
    elif quantization_config is not None or args.model_init_kwargs:
        raise ValueError(
            "quantization_config and model_init_kwargs say how to load the student, but `model` is loaded already. Pass its "
            "name or path as `model`, or leave them out."
        )
    if peft_config is not None:
        model = _add_adapter(model, peft_config, args)
    if isinstance(model, PeftModel):
        _check_adapter_kind(model.peft_config)
        if args.activation_checkpointing:
            # with a frozen embedding, checkpointed layers would see no input that needs a gradient
            model.enable_input_require_grads()
    elif is_quantized(model):
        raise ValueError(
            "The student is quantised and has no adapter, so none of its weights can be trained. Pass a peft_config (QLoRA)."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "The student has no trainable parameter. A PeftModel loaded from disk is frozen unless it is loaded with "
            "is_trainable=True."
        )
    switch_off_dropout(model)
    return model


def load_model(name: str, kwargs: dict[str, Any], *, trainable_adapter: bool = False) -> PreTrainedModel | PeftModel:
    """A causal language model by id or path; of an adapter, its base with the adapter on it."""
    if not is_adapter(name):
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    adapter_config = PeftConfig.from_pretrained(name)
    base = AutoModelForCausalLM.from_pretrained(adapter_config.base_model_name_or_path, **kwargs)
    model = get_peft_model(base, adapter_config)
    load_adapter(model, name, "default", trainable=trainable_adapter)
    return model


def load_adapter(model: PeftModel, path: str, name: str, *, trainable: bool) -> None:
    """Loads adapter weights under `name`.

    Raises:
        ValueError: If keys of the file find no place in the model, or places get no weights: an adapter that loads nothing
            would leave the base model in its stead without a word.
    """
    result = model.load_adapter(path, adapter_name=name, is_trainable=trainable)
    for kind, keys in (("has no place for", result.unexpected_keys), ("got no weights for", result.missing_keys)):
        if keys:
            raise ValueError(
                f"The adapter '{path}' does not fit: the model {kind} {len(keys)} of its tensors, the first is '{keys[0]}'. "
                "It was made for another base model or saved under another prefix."
            )


def load_tokenizer(name: str, args: OnPolicyDistillationConfig) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a model; of an adapter that came without one, its base's."""
    if is_adapter(name) and not (Path(name) / "tokenizer_config.json").is_file():
        name = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)


def is_adapter(name: str) -> bool:
    """Whether a path or Hub id holds a peft adapter."""
    return find_adapter_config_file(name) is not None


def base_name(model: PreTrainedModel | PeftModel) -> str:
    """Id or path a model was loaded from; empty if it was made in memory."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.config.name_or_path or ""


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights are stored quantised."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return getattr(base, "is_quantized", False)  # transformers sets it on quantised models only


@contextmanager
def without_adapter(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, `model` does not list the adapter `name`, so that saving it leaves that one out."""
    config = model.peft_config.pop(name, None) if isinstance(model, PeftModel) else None
    try:
        yield
    finally:
        if config is not None:
            model.peft_config[name] = config


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def switch_off_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of `model` to 0, for good.

    The ratio of the current to the sampling policy presumes that both are the same function of the weights. With dropout in
    the forward pass of training and none while sampling, the ratio would differ from 1 by noise before any update.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "layerdrop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dictionary setting that may have come as JSON from the command line."""
    return dict(json.loads(value)) if isinstance(value, str) else dict(value or {})


def _add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig, args: OnPolicyDistillationConfig) -> PeftModel:
    if isinstance(model, PeftModel):
        raise ValueError(
            "`model` has an adapter already, and `peft_config` asks for another. To go on training the adapter, leave peft_config "
            "out; to start a new one, pass the base model, or model.merge_and_unload()."
        )
    _check_adapter_kind({"default": peft_config})
    if is_quantized(model):
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=bool(args.activation_checkpointing),
            gradient_checkpointing_kwargs=as_dict(args.activation_checkpointing_kwargs) or None,
        )
    return get_peft_model(model, peft_config)  # type: ignore[return-value]  # PeftMixedModel only if mixed=True


def _check_adapter_kind(configs: dict[str, PeftConfig]) -> None:
    for config in configs.values():
        if isinstance(config, PromptLearningConfig):
            raise ValueError(
                f"The adapter is {config.peft_type.value}, which puts learned vectors before the prompt: its positions are not those "
                "the teacher scores. Use LoRA or another adapter that changes weights."
            )
