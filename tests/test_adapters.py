"""Students with adapters: each kind learns, saves, loads again; only the adapter changes; checkpointing loses no gradient."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from .helpers import lora, losses, make_model, make_trainer, save_model, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*scores as the student does"),
]

KINDS: dict[str, PeftConfig] = {
    "LoRA": lora(),
    "rsLoRA": lora(use_rslora=True),
    "DoRA": lora(use_dora=True),
    "LoRA on lm_head": lora(target_modules=["q_proj", "lm_head"]),
    "modules_to_save": lora(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
    "trainable tokens": lora(trainable_token_indices=[5, 6]),
    "IA3": IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def logits(model: Any, *, training: bool = False) -> Tensor:
    """A model's logits on a fixed text."""
    model.train(training)
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 14, 6, 15, 20, 21]])).logits


def adapter_names(model: Any) -> set[str]:
    """Names of the parameters that are trained."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def changed(model: Any, before: dict[str, Tensor]) -> set[str]:
    """Names of the parameters that are not what they were."""
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


# ---- Kinds


@pytest.mark.parametrize(
    ("kind", "tied"), [*((kind, False) for kind in KINDS), ("LoRA on lm_head", True), ("modules_to_save", True)]
)
def test_each_kind_learns_saves_and_loads_again(tmp_path: Path, kind: str, tied: bool) -> None:
    """All that is trained changes and nothing else; the saved adapter gives the same logits; the base is as it was."""
    original = make_model(0, tie_word_embeddings=tied)
    base = save_model(tmp_path / "base", original)
    trainer = make_trainer(tmp_path, model=base, peft_config=deepcopy(KINDS[kind]))
    before, trained = weights(trainer.model), adapter_names(trainer.model)
    trainer.train()
    assert changed(trainer.model, before) == trained
    assert all(torch.tensor(losses(trainer)).isfinite())
    with trainer.model.disable_adapter():
        torch.testing.assert_close(logits(trainer.model), logits(original))

    trainer.save_model(str(tmp_path / "saved"))
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "saved"))
    torch.testing.assert_close(logits(reloaded), logits(trainer.model))
    assert not torch.allclose(logits(reloaded), logits(original), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_base_as_teacher_does_not_see_the_adapter(tmp_path: Path, kind: str) -> None:
    """Whatever the adapter changes, its lm_head or its embeddings too, the teacher stays the base."""
    student = get_peft_model(make_model(0), deepcopy(KINDS[kind]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    trainer = make_trainer(tmp_path, model=student, teacher_model="base", max_steps=3)
    trained = adapter_names(student)
    rows = [{"prompt": "1+2="}, {"prompt": "33+2="}]
    rollout, *_ = trainer.rollout_and_scores(rows, 0, 0)
    same = make_trainer(tmp_path, model=make_model(5), teacher_model=make_model(0))
    expected_BT = same.score_with_teacher(rollout)
    torch.testing.assert_close(trainer.score_with_teacher(rollout), expected_BT)
    trainer.train()
    torch.testing.assert_close(trainer.score_with_teacher(rollout), expected_BT)
    assert adapter_names(student) == trained
    assert losses(trainer)[0] > 0.01


def test_mutable_state_of_the_base_is_untouched_by_many_rollouts(tmp_path: Path) -> None:
    """No merging and unmerging, which drifts in bf16: after 12 rollouts the base is bit-identical."""
    model = make_model(0, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(tmp_path, model=model, peft_config=lora(), max_completion_length=3, max_steps=12)
    trainer.train()
    after = trainer.student().get_base_model().state_dict()
    for name, tensor in before.items():
        found = after[name] if name in after else after[name.replace(".weight", ".base_layer.weight")]
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("passed", ["PeftModel", "peft_config"])
def test_only_lora_parameters_change(tmp_path: Path, passed: str) -> None:
    model = make_model(0)
    settings = {"model": get_peft_model(model, lora())} if passed == "PeftModel" else {"model": model, "peft_config": lora()}
    trainer = make_trainer(tmp_path, **settings)  # type: ignore[arg-type]
    before = weights(trainer.model)
    trainer.train()
    assert changed(trainer.model, before) == {name for name in before if "lora_" in name}
    assert len(before) - len(adapter_names(trainer.model)) == 21


# ---- Dropout


@pytest.mark.parametrize("model_dropout", [0.0, 0.5])
def test_dropout_takes_no_part(tmp_path: Path, model_dropout: float) -> None:
    """With lora_dropout 0.5 the ratio of the first step is 1 all the same, and the run is that without dropout."""
    runs = []
    for dropout, other in ((0.0, 0.0), (0.5, model_dropout)):
        student = get_peft_model(make_model(0, attention_dropout=other), lora(lora_dropout=dropout))
        torch.manual_seed(2)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        runs.append(make_trainer(tmp_path, model=student, max_steps=2))
        runs[-1].train()
    without, with_dropout = (run.state.log_history[0] for run in runs)
    assert with_dropout["ratio/max"] == pytest.approx(1, abs=1e-4)
    assert abs(with_dropout["sampler_kl/v1"]) < 1e-5
    assert losses(runs[1]) == losses(runs[0])
    assert with_dropout["grad_norm"] == without["grad_norm"]


# ---- Activation checkpointing


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def student(passed: str) -> dict[str, Any]:
    """The trainer's arguments for a student given in one of three ways; adapters that do something from the start."""
    model = make_model(0)
    if passed == "PeftModel":
        torch.manual_seed(3)
        return {"model": get_peft_model(model, lora(init_lora_weights=False))}
    return {"model": model} | ({"peft_config": lora(init_lora_weights=False)} if passed == "peft_config" else {})


@pytest.mark.parametrize("passed", ["PeftModel", "peft_config", "full weights"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(tmp_path: Path, passed: str, use_reentrant: bool) -> None:
    """The frozen embedding must not cut the checkpointed layers off from the loss."""
    found: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        keeper = KeepGradients()
        trainer = make_trainer(
            tmp_path,
            activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant} if checkpointing else None,
            max_steps=1,
            max_grad_norm=0.0,
            callbacks=[keeper],
            **student(passed),
        )
        trainer.train()
        assert trainer.student().is_activation_checkpointing is checkpointing
        assert keeper.found.keys() == adapter_names(trainer.model)
        found.append(keeper.found)
    plain, checkpointed = found
    assert len(plain) == (21 if passed == "full weights" else 28)
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(checkpointed[name], gradient)


@pytest.mark.parametrize("passed", ["PeftModel", "peft_config"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_every_lora_b_moves_in_one_step_with_checkpointing(tmp_path: Path, passed: str, use_reentrant: bool) -> None:
    """Through `train`, as a user runs it, with checkpointing left on as it is by default."""
    model = make_model(0)
    settings: dict[str, Any] = (
        {"model": get_peft_model(model, lora())} if passed == "PeftModel" else {"model": model, "peft_config": lora()}
    )
    trainer = make_trainer(
        tmp_path,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
        max_steps=1,
        **settings,
    )
    trainer.train()
    assert trainer.model.get_base_model().is_activation_checkpointing
    ends = {name: p for name, p in trainer.model.named_parameters() if "lora_B" in name}
    assert len(ends) == 14
    assert all(p.abs().max() > 0 for p in ends.values())


def test_runs_with_and_without_checkpointing_agree(tmp_path: Path) -> None:
    """Same rollouts, losses and weights."""
    runs = []
    for checkpointing in (False, True):
        runs.append(make_trainer(tmp_path, peft_config=lora(), activation_checkpointing=checkpointing, max_steps=3))
        runs[-1].train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    one, other = (weights(run.model) for run in runs)
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name])


def test_a_frozen_embedding_does_not_stop_checkpointed_full_weights(tmp_path: Path) -> None:
    model = make_model(0)
    model.get_input_embeddings().requires_grad_(False)
    before = weights(model)
    trainer = make_trainer(
        tmp_path,
        model=model,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
        max_steps=1,
    )
    trainer.train()
    assert changed(trainer.model, before) == set(before) - {"model.embed_tokens.weight"}


# ---- Quantised


def four_bit() -> BitsAndBytesConfig:
    """NF4, computed in fp32."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")


@pytest.fixture
def quantizable(tmp_path: Path) -> str:
    """A model on disk that is large enough for blocks of 64."""
    return save_model(tmp_path / "base", make_model(0, hidden_size=64, intermediate_size=64, num_hidden_layers=1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_qlora(tmp_path: Path, quantizable: str, checkpointing: bool) -> None:
    """The 4-bit base stays as it is, every LoRA parameter learns, the adapter loads on the base again."""
    trainer = make_trainer(
        tmp_path,
        model=quantizable,
        quantization_config=four_bit(),
        peft_config=lora(),
        activation_checkpointing=checkpointing,
    )
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert "Linear4bit" in kinds
    before = weights(trainer.model)
    trainer.train()
    assert all(torch.tensor(losses(trainer)).isfinite())
    assert changed(trainer.model, before) == {name for name in before if "lora_" in name}
    trainer.save_model(str(tmp_path / "saved"))
    quantised = AutoModelForCausalLM.from_pretrained(quantizable, quantization_config=four_bit(), dtype=torch.float32)
    reloaded = PeftModel.from_pretrained(quantised, str(tmp_path / "saved"))
    # in eval mode bitsandbytes may go over to bf16 kernels
    torch.testing.assert_close(logits(reloaded, training=True), logits(trainer.model), atol=1e-4, rtol=1e-4)


def test_qlora_gradients_are_those_of_the_dequantised_base(tmp_path: Path, quantizable: str) -> None:
    """After a rollout, too: bitsandbytes packs weights for inference on some CPUs, and the packed ones pass no gradient on."""
    rows = [{"prompt": "1+2="}, {"prompt": "33+2="}]
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_pretrained(quantizable, quantization_config=four_bit(), dtype=torch.float32)
    settings: dict[str, Any] = {"peft_config": lora(), "kl_logps": "current", "max_completion_length": 20}
    quantised = make_trainer(tmp_path, model=model, **settings)
    plain: Any = AutoModelForCausalLM.from_pretrained(quantizable, quantization_config=four_bit(), dtype=torch.float32)
    dequantised = make_trainer(tmp_path, model=plain.dequantize(), **settings)
    found, batch = [], None
    for trainer in (quantised, dequantised):
        torch.manual_seed(6)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
        if trainer is quantised:
            batch = trainer.scored_batch(rows)
        trainer.model.train()
        trainer.compute_loss(trainer.model, batch).backward()
        found.append({name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 14
    for name, gradient in found[1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[0][name], gradient, atol=1e-4, rtol=1e-3)


def test_qlora_with_its_base_as_teacher(tmp_path: Path, quantizable: str) -> None:
    """The quantised base is the teacher: at the start it scores as the student does, to rounding."""
    trainer = make_trainer(
        tmp_path, model=quantizable, quantization_config=four_bit(), peft_config=lora(), teacher_model="base", max_steps=3
    )
    trained = adapter_names(trainer.model)
    trainer.train()
    assert abs(losses(trainer)[0]) < 1e-4 < abs(losses(trainer)[-1])
    assert adapter_names(trainer.model) == trained
