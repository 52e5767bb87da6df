"""The student's adapter on vLLM servers: saved, loaded there under a name of its own, the version before it dropped.

A version is a name that is used once. A request names the version it wants, so that none mixes two; and vLLM keys its prefix
cache by the adapter's name and path, so that no version reads another's keys. (Loading other weights under the same name and
path, `load_inplace`, does reuse the old keys: tried with vLLM 0.32.)
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..models import changed_base
from ..processes import gathered_state, on_first_process
from ..servers import RequestRefused, Servers

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterPublisher:
    """Keeps servers on the present weights of the student's adapter.

    Args:
        servers: Replicas that serve the adapter's base. One that was down or is started anew gets the adapter before it is
            asked for anything else.
        folder: Where versions are saved; the servers must see it under the same path.
    """

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.run = secrets.token_hex(4)
        self.servers, self.folder = servers, folder.resolve() / self.run
        self.version: str | None = None
        """What requests must name."""
        self._number, self._digest = 0, b""
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # also when the program ends

    def publish(self, model: PeftModel) -> bool:
        """Gives the servers the adapter as it is now, unless they have it. All processes call this; none has a request open.

        Returns:
            Whether they had not.

        Raises:
            ServerError: If no server takes it.
        """
        state = _trained_state(model)
        load = on_first_process(lambda: self._publish(model, state))
        if load is None:
            return False
        self.version = load["lora_name"]
        if not PartialState().is_main_process:
            self.servers.was_told(LOAD, load)
        return True

    def _publish(self, model: PeftModel, state: dict[str, Tensor]) -> dict[str, Any] | None:
        """On the first process: saves and loads a new version, and drops the one before; returns the request that loads it."""
        digest = _digest(state)
        if self.version is not None and digest == self._digest:
            return None
        self._number += 1
        version, old = f"{self.run}-{self._number}", self.version
        _save(self.folder / version, model.active_peft_config, state)
        # in place: a server that has it already takes it, too
        load = {"lora_name": version, "lora_path": str(self.folder / version), "load_inplace": True}
        self._load(load)
        if old is not None:
            self._drop(old)
        self._digest = digest
        return load

    def _load(self, request: dict[str, Any]) -> None:
        try:
            self.servers.tell_each(LOAD, request, lasting=True)
        except RequestRefused as refused:
            raise RequestRefused(
                f"{refused} The server must run with --enable-lora and the environment variable "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and see the folder of the adapters under the same path: "
                f"'{self.folder.parent}'. vllm_adapter_dir names another, on a file system that both share.",
                refused.status,
            ) from refused

    def _drop(self, version: str) -> None:
        try:
            self.servers.tell_each(UNLOAD, {"lora_name": version})
        except RequestRefused as refused:
            if refused.status != 404:  # a server that was started anew does not know it
                raise
        shutil.rmtree(self.folder / version)


def check_servable(model: PreTrainedModel | PeftModel) -> None:
    """Raises ValueError for a student that vLLM cannot be kept up with by its adapter alone."""
    if not isinstance(model, PeftModel):
        raise ValueError(
            "rollout_engine='vllm' sends the servers the student's adapter before each rollout, but the student has none: all "
            "its weights are trained. Pass a peft_config (LoRA), or use rollout_engine='transformers'."
        )
    if len(model.active_adapters) != 1:
        raise ValueError(
            f"The student has {len(model.active_adapters)} active adapters {model.active_adapters}, but a request to a vLLM "
            "server names one. Activate one of them, or merge the others into the base that the server serves."
        )
    config = model.active_peft_config
    settings, reason = config.to_dict(), changed_base(model)
    unknown = {
        f"its adapter is {config.peft_type}, not LoRA": config.peft_type != PeftType.LORA,
        "its adapter uses DoRA (use_dora)": settings.get("use_dora"),
        f"its adapter trains whole modules (modules_to_save {settings.get('modules_to_save')})": settings.get(
            "modules_to_save"
        ),
        "its adapter trains rows of the embedding (trainable_token_indices)": settings.get("trainable_token_indices"),
        "its adapter has biases (lora_bias)": settings.get("lora_bias"),
        "its adapter is an activated one (aLoRA)": settings.get("alora_invocation_tokens"),
        f"{reason}, which the server's base would not have": reason,
    }
    for what, found in unknown.items():
        if found:
            raise ValueError(
                f"rollout_engine='vllm' sends the servers a plain LoRA adapter, but the student cannot be sent so: {what}. "
                "Use a LoraConfig without it, or rollout_engine='transformers'."
            )


def _trained_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under the names a file has them by, on the first process; all must call this."""
    state = gathered_state(model) if isinstance(model, FSDPModule) else None
    if not PartialState().is_main_process:
        return {}
    return get_peft_model_state_dict(model, state, cast(str, model.active_adapter), save_embedding_layers=False)


def _digest(state: dict[str, Tensor]) -> bytes:
    """Tells two sets of weights apart. By content: optimizer steps, a resume, `load_best_model_at_end` all change them."""
    digest = hashlib.blake2b()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _save(folder: Path, config: PeftConfig, state: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    config.save_pretrained(str(folder))
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors"
    )
