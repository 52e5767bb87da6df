"""A model spread over processes: which ways of spreading work, sharding the teacher as the student is, gathering weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list, fsdp2_prepare_model, gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from . import checks
from .models import is_quantized, without_peft
from .servers import ServerError

T = TypeVar("T")


def fsdp_plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """The FSDP settings of the accelerate configuration; None if it asks for no FSDP."""
    return accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None


def check_launch(accelerator: Accelerator) -> None:
    """Raises ValueError for a way of spreading the model over processes that was not made to work, or does not."""
    plugin = fsdp_plugin(accelerator)
    if plugin is not None and plugin.fsdp_version == 1:
        raise ValueError(
            "The accelerate configuration asks for FSDP1, under which `generate` fails on the sharded weights; torch has "
            "deprecated it. Set `fsdp_version: 2` in its fsdp_config (`accelerate to-fsdp2 --config_file old.yaml "
            "--output_file new.yaml` converts the rest), or start from trl_opd/accelerate_configs/fsdp2.yaml."
        )
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "The accelerate configuration has `fsdp_activation_checkpointing: true`, which renames the layers, so that an "
            "adapter is saved empty. Set it to false: the trainer's `activation_checkpointing`, on by default, does the same."
        )
    if accelerator.num_processes < (launched := int(os.environ.get("WORLD_SIZE", "1"))):
        raise ValueError(
            f"{launched} processes were launched, but each would train alone: accelerate found no GPU, and joins processes on "
            "the CPU only if it is told. Pass `use_cpu=True` (`--use_cpu`) to train on the CPU."
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"The accelerate configuration asks for {accelerator.distributed_type.value}, with which distillation was never "
            "run. FSDP2 spreads weights, gradients and optimizer state as ZeRO-3 does: trl_opd/accelerate_configs/fsdp2.yaml."
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise ValueError(
            "The accelerate configuration asks for tensor, context or sequence parallelism, in which several processes share "
            "one batch; here each samples completions of its own. Leave tp_size, cp_size and sp_size at 1."
        )


def ensure_sharded(model: nn.Module, accelerator: Accelerator) -> None:
    """Shards the student if training has not done so yet, as when it is evaluated first; does nothing without FSDP."""
    plugin = fsdp_plugin(accelerator)
    if plugin is not None and not isinstance(model, FSDPModule):
        shard(model, accelerator)
        register_fsdp_forward_method(model, "generate")
        plugin.auto_wrap_policy = None  # training finds nothing left to wrap


def prepare_frozen(model: nn.Module, accelerator: Accelerator, *, stays: bool = False) -> nn.Module:
    """Puts a model that is not trained on the training device, unless it `stays` where it is; under FSDP, each process's part.

    Accelerate's own `prepare_model(model, evaluation_mode=True)` would leave the whole of it on every process.
    """
    model.requires_grad_(False).eval()  # before sharding: weights that might be trained would be kept in fp32
    if fsdp_plugin(accelerator) is None:
        return accelerator.prepare_model(model, device_placement=not stays, evaluation_mode=True)
    if stays:
        raise ValueError(
            "teacher_offload is True, but under FSDP each process holds its part of the teacher only, which cannot be moved "
            "by itself. Leave it out, and set `fsdp_offload_params: true` in the accelerate configuration: it keeps the parts "
            "of student and teacher in CPU memory."
        )
    if is_quantized(model):
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        checks.warn(
            f"The teacher is quantised, so that it cannot be sharded: each process holds the whole of it, {size / 2**30:.1f} "
            "GiB. A teacher in bf16 is shared among the processes."
        )
        return model
    return shard(model, accelerator)


def shard(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shards `model` layer by layer with the settings of the accelerate configuration, its own layer classes if they differ.

    Under `fsdp_cpu_ram_efficient_loading` only the first process has loaded the weights; the others get their parts from it.
    """
    state, plugin = accelerator.state, fsdp_plugin(accelerator)
    assert plugin is not None, "there is no FSDP configuration"
    own = copy.copy(plugin)
    if own.auto_wrap_policy is not None and own.transformer_cls_names_to_wrap is not None:
        classes = {type(module).__name__ for module in model.modules()}
        if not classes & set(own.transformer_cls_names_to_wrap):  # those of the student
            own.auto_wrap_policy, own.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, None
    state.fsdp_plugin = own  # what `fsdp2_prepare_model` learns of this model is wrong for the next one
    try:
        model = fsdp2_prepare_model(accelerator, model)
    finally:
        state.fsdp_plugin = plugin
    return model


def greatest(numbers: list[int]) -> list[int]:
    """The greatest of each number over the processes, each of which must call this."""
    return [max(column) for column in zip(*gather_object([numbers]), strict=True)]


def evened(passes: list[list[T]], model: nn.Module | Any) -> list[list[T]]:
    """The passes of this process and, if one of `model` is a pass of all processes, empty ones up to the most that any has."""
    spread = isinstance(model, nn.Module) and any(isinstance(m, FSDPModule | DistributedDataParallel) for m in model.modules())
    return passes + [[]] * (greatest([len(passes)])[0] - len(passes)) if spread else passes


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, a layer of a sharded model that was gathered stays: `generate` gathers each once, not once for each token.

    The whole model is then on each process, in the precision it computes in. Does nothing for a model that is not sharded.
    """
    layers = [module for module in model.modules() if isinstance(module, FSDPModule) and _reshards(module)]
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()


def reshard(model: nn.Module) -> None:
    """Lets go of what forward passes of a sharded model have left gathered; its parameters are this process's shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshards(module: FSDPModule) -> bool:
    group = module._get_fsdp_state()._fsdp_param_group  # None if its parameters all belong to layers inside it
    return group is not None and group.post_forward_mesh_info is not None


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a sharded model on the first process's CPU, nothing on the others; all must call this.

    Of an adapted model, what is trained only: the base is neither gathered nor saved.
    """
    adapted = without_peft(model) is not model
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


@contextmanager
def served() -> Iterator[None]:
    """Where servers are asked: if one was lost to any process, all get a `ServerError`, so that none waits for another.

    All processes must come here, and nothing inside may wait for the others, unless no server is asked.
    """
    error = None
    try:
        yield
    except ServerError as caught:
        error = caught
    if messages := [message for message in gather_object([str(error) if error else ""]) if message]:
        raise error or ServerError(f"On another process: {messages[0]}")


def on_first_process(function: Callable[[], T]) -> T:
    """What `function()` returns on the first process, which alone calls it; its error is raised on all. All must call this."""
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:  # whatever it is, the others wait for it
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])
