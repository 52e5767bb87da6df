"""Real architectures, tiny and random: what is scored, sampled and trained does not depend on how rows are padded."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trl_opd import DistillationWarning, token_logps
from trl_opd.batch import Completion
from trl_opd.models import switch_off_dropout
from trl_opd.rollout import TransformersEngine

from .helpers import lora, make_config, make_model, make_trainer, weights

COMMON: dict[str, Any] = {
    "vocab_size": 43,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.4,
}
GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA: dict[str, Any] = {"mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# The single-step code of Zamba2 and Nemotron-H in transformers leaves out the lower bound of the time step that the
# code for whole sequences keeps, so that generation and scoring differ by about 1e-3 nats where it binds.
UNBOUND: dict[str, Any] = {"time_step_min": 1e-9, "time_step_floor": 1e-4}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {},
    "phi3": {},
    # scaled, capped or biased logits
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0, "sliding_window": 4},
    "gemma3_text": {"final_logit_softcapping": 2.0, "sliding_window": 4},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.2},
    "gptj": {**GPT, "rotary_dim": 4},
    # positions that are learned, or a bias on attention
    "gpt2": GPT,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "gpt_neox": {},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "bloom": {"n_layer": 2, "n_head": 2},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": True, "head_dim": None},
    "persimmon": {},
    # mixtures of experts
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    # a recurrent state, alone or beside attention
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "state_size": 4, "n_groups": 1, "chunk_size": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 16, "mamba_n_heads": 2},
    "bamba": {**MAMBA, "mamba_n_heads": 4, "attn_layer_indices": [1]},
    "jamba": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
        "mamba_headdim": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "mamba_d_state": 4,
        "chunk_size": 4,
        **UNBOUND,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 4,
        "chunk_size": 4,
        **UNBOUND,
    },
    "recurrent_gemma": {"lru_width": 16, "num_hidden_layers": 3, "attention_window_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
}
NOT_BATCHED: dict[str, dict[str, Any]] = {
    # transformers' `generate` mixes up the rows of a batch: MiniMax if they are padded, RWKV always
    "minimax": {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "rwkv": {"attention_hidden_size": 16},
}
PHIMOE: dict[str, Any] = {"num_local_experts": 4}

# peft refuses the output projection of Mamba layers, whose kernels read the weight past the adapter. It does not refuse
# Jamba's dt_proj, whose weight is read in the same way.
LORA_TARGETS = {
    "mamba": ["in_proj", "x_proj"],
    "mamba2": ["in_proj"],
    "jamba": ["in_proj", "x_proj", "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "falcon_h1": ["in_proj", "q_proj", "v_proj", "o_proj"],
    "nemotron_h": ["in_proj", "q_proj", "v_proj", "o_proj"],
}
DROPOUT_NAMES = [
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "embd_dropout", "embedding_dropout"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "resid_dropout", "embed_dropout", "classifier_dropout"),
    *("layerdrop", "router_jitter_noise"),
]
WITHOUT_DROPOUT = {"mamba", "mamba2", "lfm2"}
QUICK_TO_TRAIN = {"gpt2", "opt", "falcon"}
TRAINED = [pytest.param(name, marks=[] if name in QUICK_TO_TRAIN else [pytest.mark.slow]) for name in ARCHITECTURES]
WITH_DROPOUT_TRAINED = [
    *("gpt2", "opt", "falcon"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llama", "persimmon", "gpt_neo", "gemma2", "bloom", "qwen3_moe")
    ),
]


def build(name: str, **more: Any) -> PreTrainedModel:
    """A tiny random model of an architecture, in eval mode."""
    torch.manual_seed(0)
    own = {**ARCHITECTURES, **NOT_BATCHED, "phimoe": PHIMOE}[name]
    settings = {key: value for key, value in {**COMMON, **own, **more}.items() if value is not None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).eval()


def ragged_rows() -> list[list[int]]:
    """Rows of 3, 9, 1 and 6 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 43, (length,), generator=generator).tolist() for length in (3, 9, 1, 6)]


def pad(rows: list[list[int]], side: str, width: int = 11) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask; "ragged" puts padding on both sides."""
    ids, mask = torch.full((len(rows), width), 5), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        start = {"left": width - len(tokens), "right": 0, "ragged": (width - len(tokens)) // 2}[side]
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
    return ids, mask


@torch.no_grad()
def logps_alone(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Each token's log-prob from the model's own logits for this row without padding."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    logps = torch.log_softmax(logits / temperature, dim=-1)
    return torch.tensor([0.0] + [float(logps[t - 1, tokens[t]]) for t in range(1, len(tokens))])


def rollout(model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, **settings: Any) -> list[Completion]:
    """Completions of at most 8 tokens from the engine that the trainer uses."""
    args = make_config(tmp_path, max_completion_length=8, **settings)
    torch.manual_seed(0)
    return TransformersEngine(args, stop_ids=[1], pad_id=0, vocab_size=43).generate(model, prompts)


def gaps(model: PreTrainedModel, prompts: list[list[int]], completions: list[Completion], temperature: float = 1.0) -> Tensor:
    """(N,) differences of the log-probs noted while sampling from those of each row alone, over all completions."""
    differences = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logps = logps_alone(model, prompt + completion.ids, temperature)[len(prompt) :]
        differences.append((logps - torch.tensor(completion.logps)).abs())
    return torch.cat(differences)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *NOT_BATCHED, "phimoe"])
def test_padded_rows_score_as_each_row_alone(name: str, temperature: float) -> None:
    """Left-padded, right-padded and with padding on both sides; the padding is a real token's id."""
    model, rows = build(name), ragged_rows()
    alone = [logps_alone(model, row, temperature) for row in rows]
    assert torch.cat(alone).std() > 0.1, "the model's distributions are too flat to tell anything"
    for side in ("left", "right", "ragged"):
        ids, mask = pad(rows, side)
        with torch.no_grad():
            logps = token_logps(model, ids, mask, temperature=temperature)
        assert logps[mask == 0].eq(0).all()
        for row, expected in enumerate(alone):
            torch.testing.assert_close(logps[row][mask[row] == 1], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_noted_while_sampling_are_those_of_scoring(name: str, tmp_path: Path) -> None:
    """Prompts of 3, 9, 1 and 6 tokens in one batch, which generation pads on the left."""
    model, prompts = build(name), ragged_rows()
    completions = rollout(model, prompts, tmp_path, temperature=0.7)
    assert gaps(model, prompts, completions, temperature=0.7).max() < 1e-4


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h"])
def test_bound_time_steps_stay_within_the_ratio(name: str, tmp_path: Path) -> None:
    """With transformers' default bound generation and scoring differ, but too little to be more than rounding to a ratio."""
    model, prompts = build(name, time_step_min=None, time_step_floor=None), ragged_rows()
    assert gaps(model, prompts, rollout(model, prompts, tmp_path)).max() < 0.02


@pytest.mark.parametrize("name", NOT_BATCHED)
def test_an_architecture_that_generates_wrongly_in_batches_is_told(name: str, tmp_path: Path) -> None:
    """The trainer warns at the first step and names the way out, which then samples what it scores."""
    trainer = make_trainer(tmp_path, model=build(name), max_steps=1)
    with pytest.warns(DistillationWarning, match="while it generates.*per_device_rollout_batch_size=1"):
        trainer.train()
    model, prompts = build(name), ragged_rows()
    one_by_one = rollout(model, prompts, tmp_path, per_device_rollout_batch_size=1)
    assert gaps(model, prompts, one_by_one).max() < 1e-4


@pytest.mark.parametrize("name", TRAINED)
def test_one_step_of_full_training(name: str, tmp_path: Path) -> None:
    """Every weight moves, nothing is warned of, and the policy that is trained is the one that sampled."""
    trainer = make_trainer(tmp_path, model=build(name), max_steps=1)
    before = weights(trainer.model)
    figures = train_one_step(trainer)
    assert figures["sampler_kl/v2"] < 1e-9 and abs(figures["ratio/max"] - 1) < 1e-4
    unchanged = [name for name, weight in trainer.model.named_parameters() if torch.equal(weight, before[name])]
    assert unchanged == []


@pytest.mark.parametrize("name", TRAINED)
def test_one_step_of_lora_training(name: str, tmp_path: Path) -> None:
    """Every adapter's B moves away from zero (A has no gradient yet), and no weight of the base does."""
    peft_config = lora(target_modules=LORA_TARGETS.get(name, "all-linear"))
    trainer = make_trainer(tmp_path, model=build(name), peft_config=peft_config, max_steps=1, activation_checkpointing=True)
    before = weights(trainer.model)
    figures = train_one_step(trainer)
    assert figures["sampler_kl/v2"] < 1e-9 and abs(figures["ratio/max"] - 1) < 1e-4
    changed = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "lora_B" in name} != set()


def train_one_step(trainer: Any) -> dict[str, float]:
    """The logged figures of a step that must be finite and free of our warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DistillationWarning)
        trainer.train()
    (figures,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["grad_norm"] > 0
    return figures


@pytest.mark.parametrize("name", [*ARCHITECTURES, *NOT_BATCHED, "phimoe"])
def test_switching_dropout_off_leaves_eval_mode_as_it_was(name: str) -> None:
    """PhiMoE has a threshold called jitter that holds in eval mode; without it the student would be another model."""
    model = build(name, **dict.fromkeys(DROPOUT_NAMES, 0.3))
    ids, mask = pad(ragged_rows(), "right")
    before = token_logps(model, ids, mask)
    switch_off_dropout(model)
    assert torch.equal(token_logps(model, ids, mask), before)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITHOUT_DROPOUT])
def test_no_dropout_is_left(name: str) -> None:
    """Attention, residual, embedding, hidden and layer dropout at 0.3, gradient checkpointing on, train mode: no noise."""
    model = build(name, **dict.fromkeys(DROPOUT_NAMES, 0.3))
    ids, mask = pad(ragged_rows(), "right")
    expected = token_logps(model, ids, mask)
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    noisy = torch.stack([token_logps(model, ids, mask) for _ in range(3)])
    assert not torch.allclose(noisy, expected, atol=1e-3), "the architecture has no dropout by these names"
    switch_off_dropout(model)
    for _ in range(3):
        torch.testing.assert_close(token_logps(model, ids, mask), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", WITH_DROPOUT_TRAINED)
def test_a_student_with_dropout_trains_on_policy(name: str, adapter: bool, tmp_path: Path) -> None:
    """At the first step the current and the sampled log-probs agree, checkpointing on; a random adapter drops out too."""
    student = build(name, **dict.fromkeys(DROPOUT_NAMES, 0.3))
    # peft has no dropout for experts, which "all-linear" takes in
    targets = ["q_proj", "v_proj"] if name == "qwen3_moe" else "all-linear"
    peft_config = lora(lora_dropout=0.3, init_lora_weights=False, target_modules=targets) if adapter else None
    trainer = make_trainer(tmp_path, model=student, peft_config=peft_config, max_steps=1, activation_checkpointing=True)
    figures = train_one_step(trainer)
    assert figures["sampler_kl/v2"] < 1e-9 and abs(figures["ratio/max"] - 1) < 1e-4


def test_dropout_of_a_mixture_is_off_in_the_trainer_too(tmp_path: Path) -> None:
    """Mixtral multiplies a layer's input by noise in training, under an attribute that is no dropout."""
    trainer = make_trainer(tmp_path, model=build("mixtral", router_jitter_noise=0.5), teacher_model=make_model(1), max_steps=1)
    figures = train_one_step(trainer)
    assert figures["sampler_kl/v2"] < 1e-9 and abs(figures["ratio/max"] - 1) < 1e-4
