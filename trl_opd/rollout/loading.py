"""The rollout engine that the settings name, checked against the student before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import policy_vocab_size, prompt_limit, stop_token_ids
from ..config import OnPolicyDistillationConfig
from ..servers import Servers
from .publisher import AdapterPublisher, check_servable
from .transformers import TransformersEngine
from .vllm import VLLMEngine

PROBE = (
    "Each year the river rises over the fields. In 1931 the farmers counted 27 flooded houses, two lost cows and one very "
    "angry goose; nobody wrote down what the goose had said."
)


def make_engine(
    args: OnPolicyDistillationConfig,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    synced_gpus: bool,
) -> TransformersEngine | VLLMEngine:
    """Makes the engine that `args.rollout_engine` names.

    Args:
        args: The trainer's settings.
        model: The student.
        tokenizer: The student's.
        synced_gpus: Whether the processes hold parts of one student.

    Raises:
        ValueError: If the servers cannot sample from this student.
        ServerError: If they do not answer.
    """
    stop_ids, vocab_size = stop_token_ids(model, tokenizer), policy_vocab_size(tokenizer)
    if args.rollout_engine == "transformers":
        pad_id = cast(int, tokenizer.pad_token_id)
        return TransformersEngine(args, stop_ids=stop_ids, pad_id=pad_id, vocab_size=vocab_size, synced_gpus=synced_gpus)
    check_servable(model)
    servers = Servers(
        args.vllm_server_base_url or [],
        timeout=args.vllm_server_timeout,
        concurrency=args.per_device_rollout_batch_size or args.step_batch_size,
    )
    longest = prompt_limit(model, args) + args.max_completion_length
    folder = Path(args.vllm_adapter_dir or f"{args.output_dir}/_vllm_adapters")
    return VLLMEngine(
        args,
        servers,
        AdapterPublisher(servers, folder),
        base=_served_base(servers, longest),
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        num_rows=model.config.get_text_config().vocab_size,
        probe_ids=tokenizer(PROBE)["input_ids"][: min(64, longest - 1)],
    )


def _served_base(servers: Servers, longest: int) -> str:
    """The name of the base on the servers: the one in their URLs, else the first that is no adapter.

    Raises:
        ValueError: If one of the servers does not have it, or cannot read `longest` tokens.
    """
    names = set()
    for url, answer in zip(servers.urls, servers.get("/v1/models"), strict=True):
        bases: dict[str, Any] = {entry["id"]: entry for entry in answer["data"] if entry.get("parent") is None}
        name = servers.model or next(iter(bases), None)
        if name not in bases:
            raise ValueError(
                f"{url} serves no base model '{name}'; it serves {sorted(bases)}. Name one of them after the '#'."
            )
        context = bases[name].get("max_model_len")
        if context is not None and context < longest:
            raise ValueError(
                f"A prompt and its completion may have {longest} tokens (max_prompt_length, or what the student's context "
                f"leaves, and max_completion_length), but {url} was started with a context of {context}. Set "
                "max_prompt_length or max_completion_length lower, or start it with a larger --max-model-len."
            )
        names.add(name)
    if len(names) > 1:
        raise ValueError(f"The replicas {servers.urls} serve different base models: {sorted(names)}. List replicas of one.")
    return names.pop()
