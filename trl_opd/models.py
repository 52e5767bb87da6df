"""Student and teacher models: loading, adapters, the modes they are used in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import broadcast_object_list, is_compiled_module
from peft import (
    PeftConfig,
    PeftModel,
    PeftType,
    PromptLearningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_fsdp_enabled
from transformers.utils.peft_utils import find_adapter_config_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from .config import OnPolicyDistillationConfig, as_dict

TEACHER_ADAPTER = "trl_opd_teacher"
"""How the names of adapters begin that teachers have on the student's base; no user would give one such a name."""
NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Training noise of mixtures of experts. PhiMoE's router_jitter_noise is none, but a threshold that holds in eval mode too."""


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
        kwargs = {
            "dtype": "float32",
            "trust_remote_code": args.trust_remote_code,
            **as_dict(args.model_init_kwargs),
        }
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
        check_adapter_kind(model.peft_config)
        _check_not_merged(model)
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
    if is_quantized(model):
        _keep_differentiable(model)
    return model


def load_model(name: str, kwargs: dict[str, Any], *, trainable_adapter: bool = False) -> PreTrainedModel | PeftModel:
    """A causal language model by id or path; of an adapter, its base with the adapter on it."""
    if not is_adapter(name):
        return _load_once(lambda: AutoModelForCausalLM.from_pretrained(name, **kwargs), bool(kwargs.get("trust_remote_code")))
    adapter_config = PeftConfig.from_pretrained(name)
    check_adapter_kind({name: adapter_config})
    adapter_config.inference_mode = not trainable_adapter
    base = cast(PreTrainedModel, load_model(str(adapter_config.base_model_name_or_path), kwargs))
    model = cast(PeftModel, get_peft_model(base, adapter_config))
    load_adapter(model, name, "default", trainable=trainable_adapter)
    return model


def _load_once(load: Callable[[], PreTrainedModel], trust_remote_code: bool) -> PreTrainedModel:
    """`load()`; under `fsdp_cpu_ram_efficient_loading` only on the first process, which sends the others no weights yet.

    They get the same model with weights that nothing was written to, which take no memory, until it is sharded. All processes
    must call this. A quantised model, which is not sharded, is loaded by each.
    """
    if not is_fsdp_enabled():
        return load()
    model = load() if PartialState().is_main_process else None
    facts: list[Any] = [None]
    if model is not None and not is_quantized(model):
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        facts = [(model.config, model.config._attn_implementation, model.generation_config, dtypes)]
    broadcast_object_list(facts)
    if model is not None or facts[0] is None:
        return model or load()
    config, attention, generation_config, dtypes = facts[0]
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=trust_remote_code)
    model.tie_weights()  # which the empty ones are not yet
    for name, parameter in list(model.named_parameters()):
        module, _, last = name.rpartition(".")
        # not left on the meta device: accelerate tells parameters by their address when it gives the optimizer sharded ones
        empty = torch.empty(parameter.shape, dtype=dtypes[name])
        setattr(model.get_submodule(module), last, nn.Parameter(empty, parameter.requires_grad))
    model.tie_weights()
    model.generation_config = generation_config
    return model.eval()


def load_adapter(model: PeftModel, path: str, name: str, *, trainable: bool) -> None:
    """Loads adapter weights under `name`.

    Raises:
        ValueError: If keys of the file find no place in the model, or places get no weights: an adapter that loads nothing
            would leave the plain base model in its place without a word.
    """
    result = model.load_adapter(path, adapter_name=name, is_trainable=trainable)
    for kind, keys in (("has no place for", result.unexpected_keys), ("got no weights for", result.missing_keys)):
        if keys:
            raise ValueError(
                f"The adapter '{path}' does not fit: the model {kind} {len(keys)} of its tensors, the first is '{keys[0]}'. "
                "It was made for another base model or saved under another prefix."
            )


def load_tokenizer(name: str, args: OnPolicyDistillationConfig) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a model; of an adapter that came without one, its base's.

    Raises:
        ValueError: If there is none.
    """
    if not name:
        raise ValueError(
            "The student was made in memory, so that there is no tokenizer to load with it. Pass its tokenizer as "
            "processing_class."
        )
    if is_adapter(name) and not (Path(name) / "tokenizer_config.json").is_file():
        name = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No tokenizer could be loaded from '{name}'. Save one there with tokenizer.save_pretrained; a student's can be "
            "passed as processing_class instead."
        ) from error


def is_adapter(name: str) -> bool:
    """Whether a path or Hub id holds a peft adapter."""
    return find_adapter_config_file(name) is not None


def without_peft(model: Any) -> Any:
    """The transformers model inside a PeftModel, its adapters in place; any other model as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def unwrapped(model: Any) -> tuple[Any, bool]:
    """The transformers model inside what training wraps it in, and whether it is compiled as a whole."""
    compiled = False
    while isinstance(model, DistributedDataParallel) or is_compiled_module(model):
        compiled = compiled or is_compiled_module(model)
        model = model._orig_mod if is_compiled_module(model) else model.module
    inner = without_peft(model)
    return inner, compiled or any(module._compiled_call_impl is not None for module in (model, inner))


def base_name(model: PreTrainedModel | PeftModel) -> str:
    """Id or path a model was loaded from; empty if it was made in memory."""
    base = without_peft(model)
    return base.config.name_or_path or ""


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights are stored quantised."""
    base = without_peft(model)
    return getattr(base, "is_quantized", False)  # transformers sets it on quantised models only


def teacher_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that teachers have on the student's base."""
    return [name for name in model.peft_config if name.startswith(TEACHER_ADAPTER)] if isinstance(model, PeftModel) else []


def next_teacher_adapter(model: nn.Module) -> str:
    """A name for one more of them. It has a number and not the teacher's name, which may hold a dot."""
    number = len(teacher_adapters(model))
    return f"{TEACHER_ADAPTER}_{number + 1}" if number else TEACHER_ADAPTER


@contextmanager
def without_teachers(model: nn.Module) -> Iterator[None]:
    """Inside, `model` does not list the adapters of teachers, so that saving it leaves them out."""
    configs: dict[str, PeftConfig] = model.peft_config if isinstance(model, PeftModel) else {}
    taken = {name: configs.pop(name) for name in teacher_adapters(model)}
    try:
        yield
    finally:
        configs.update(taken)


def state_without_teachers(model: nn.Module, state_dict: dict[str, Any] | None) -> dict[str, Any] | None:
    """What to save of a model without its teachers; peft knows whose its tensors are only while the model lists them."""
    if not (names := set(teacher_adapters(model))):
        return state_dict
    return {
        key: tensor
        for key, tensor in (model.state_dict() if state_dict is None else state_dict).items()
        if not names & set(key.split("."))
    }


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
    modules = list(model.modules())
    configs = [config for module in modules if isinstance(config := vars(module).get("config"), PreTrainedConfig)]
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for owner in (*modules, *configs):  # some models, Falcon for one, read the probability from their config at each pass
        for name, value in vars(owner).items():
            if isinstance(value, float) and ("drop" in name or name in NOISE):
                setattr(owner, name, 0.0)


def check_adapter_kind(configs: dict[str, PeftConfig]) -> None:
    """Raises ValueError for an adapter that does not work by changing weights."""
    for name, config in configs.items():
        if isinstance(config, PromptLearningConfig):
            raise ValueError(
                f"The adapter '{name}' is {cast(PeftType, config.peft_type).value}, which puts learned vectors before the "
                "prompt: student and teacher would no longer score the same positions. Use LoRA or another adapter that "
                "changes weights."
            )


def rewrites_base(config: PeftConfig) -> bool:
    """Whether switching such an adapter off leaves another model: base weights changed or trained, layers repeated."""
    settings = config.to_dict()
    start = str(settings.get("init_lora_weights")).lower()
    if settings.get("layer_replication"):
        return True
    return settings.get("bias", "none") != "none" or start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def changed_base(student: PeftModel) -> str | None:
    """Why the student without its adapter is not the model its adapter was made for; None if it is."""
    config = student.active_peft_config.to_dict()
    if rewrites_base(student.active_peft_config):
        return f"its adapter (init_lora_weights {config.get('init_lora_weights')}, bias {config['bias']}) changes base weights"
    trained = [
        n for n, p in student.named_parameters() if p.requires_grad and not set(n.split(".")) & set(student.peft_config)
    ]
    return f"{len(trained)} of its base's own weights are trained, the first is '{trained[0]}'" if trained else None


def _add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig, args: OnPolicyDistillationConfig) -> PeftModel:
    if isinstance(model, PeftModel):
        raise ValueError(
            "`model` has an adapter already, and `peft_config` asks for another. To go on training the adapter, leave "
            "peft_config out; to start a new one, pass the base model, or model.merge_and_unload()."
        )
    check_adapter_kind({"default": peft_config})
    if is_quantized(model):
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=bool(args.activation_checkpointing),
            gradient_checkpointing_kwargs=cast(Any, args.activation_checkpointing_kwargs),
        )
    return get_peft_model(model, peft_config)  # type: ignore[return-value]  # PeftMixedModel only if mixed=True


def _keep_differentiable(model: nn.Module) -> None:
    """Stops bitsandbytes from packing 4-bit weights for inference.

    On a CPU it does so in the first forward pass in eval mode, which is a rollout, and from then on no gradient passes through
    them to the adapters before.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):  # of its Linear4bit
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - unknown to nn.Module


def _check_not_merged(model: PeftModel) -> None:
    merged = {name for layer in model.modules() if isinstance(layer, BaseTunerLayer) for name in layer.merged_adapters}
    if merged:
        raise ValueError(
            f"The adapter {sorted(merged)} is merged into the student's weights, where no gradient reaches it. Call "
            "model.unmerge_adapter() to go on training it, or model.merge_and_unload() and pass a peft_config to start a new "
            "one."
        )
