"""Tiny models, tokenizers and trainers that tests share. Everything is made in memory; nothing is downloaded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


def make_tokenizer(
    *, pad: bool = True, bos: bool = False, chat: bool = False, vocab: dict[str, int] | None = None
) -> PreTrainedTokenizerFast:
    """One token a character; ids 0 and 1 are pad and eos (pad None on request, then pad == eos after preparation)."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocab = vocab or {token: i for i, token in enumerate([*special, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>" if pad else None,
        bos_token="<bos>" if bos else None,
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int = 0, *, vocab_size: int = 43, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A two-layer Llama of about 10,000 parameters with distributions that are far from uniform."""
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "initializer_range": 0.4,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{**settings, **config}))
    return model.to(dtype).eval()


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """Saves a model with its tokenizer; returns the path."""
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def make_dataset(num_rows: int = 16, **columns: list[Any]) -> datasets.Dataset:
    """Prompts of 3 to 6 characters."""
    prompts = [f"{i}+{i * 7 % 100}=" for i in range(num_rows)]
    return datasets.Dataset.from_dict({"prompt": prompts, **columns})


def make_config(folder: Path, **settings: Any) -> OnPolicyDistillationConfig:
    """Small, quick, on the CPU."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "activation_checkpointing": False,
        "report_to": "none",
        "report": False,  # test_report.py has it on
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return OnPolicyDistillationConfig(**{**defaults, **settings})


def lora(**settings: Any) -> LoraConfig:
    """LoRA on all linear layers."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**defaults, **settings})


def make_trainer(folder: Path, *, cls: type[OnPolicyDistillationTrainer] = OnPolicyDistillationTrainer, **more: Any) -> Any:
    """A trainer over tiny models; keyword arguments of the trainer replace the defaults, others go to the config."""
    names = {"model", "teacher_model", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"}
    names |= {"quantization_config", "peft_config", "reward_funcs", "evaluators", "tools", "rollout_func"}
    arguments = {name: more.pop(name) for name in list(more) if name in names}
    defaults = {
        "model": lambda: make_model(0),
        "teacher_model": lambda: make_model(1),
        "train_dataset": make_dataset,
        "processing_class": make_tokenizer,
    }
    for name, make in defaults.items():
        if name not in arguments:
            arguments[name] = make()
    return cls(args=make_config(folder, **more), **arguments)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def losses(trainer: Any) -> list[float]:
    """The logged training losses."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


gc.freeze()  # each `train` collects garbage; it need not look through all that has been imported by now (0.2 s each time)
