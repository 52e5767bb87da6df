"""Heads that score in chunks under DDP and FSDP2: two processes train what one trains with its model's whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trl_opd.last_layer import known_head
from trl_opd.models import without_peft

from .helpers import lora, make_dataset, make_model, make_trainer
from .processes import Processes, launched
from .test_architectures import build
from .test_processes import Given, assert_same_figures, assert_same_weights, told

pytestmark = pytest.mark.dist
ADAPTED_HEAD = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "checkpointing": {"activation_checkpointing": True},
    "LoRA on lm_head": {"peft_config": ADAPTED_HEAD},
    "LoRA on lm_head, checkpointing": {"peft_config": ADAPTED_HEAD, "activation_checkpointing": True},
    "modules_to_save": {"peft_config": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
    "cap": {"architecture": "gemma2"},
    "bf16": {"bf16": True},
}


def train_variant(folder: str, variant: str, *, whole: bool = False, **more: Any) -> Any:
    """Three steps; in some micro-batches a process has no token to train on."""
    settings = {**VARIANTS[variant], **more}
    tied = settings.pop("tie_word_embeddings", False)
    name = settings.pop("architecture", None)
    model = build(name) if name else make_model(tie_word_embeddings=tied)
    if "peft_config" in settings:
        settings["peft_config"] = lora(**settings["peft_config"])
    trainer = make_trainer(
        Path(folder),
        cls=Given,
        model=model,
        train_dataset=make_dataset(12),
        max_steps=3,
        learning_rate=1e-3,
        mask_truncated_completions=True,
        gradient_accumulation_steps=2,
        **settings,
    )
    if whole:  # something that no configuration tells of, done to the wide logits of the probe only
        head = without_peft(trainer.model).get_output_embeddings()
        head.register_forward_hook(lambda module, args, logits: logits if logits.abs().max() < 90 else -logits)
    trainer.train()
    found = told(trainer)
    found["chunks"] = known_head(trainer.model_wrapped, torch.tensor([[5, 6, 7]])) is not None
    return found


@pytest.mark.filterwarnings("ignore:.*does more to its logits")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_what_whole_logits_train_on_one(two: Processes, tmp_path: Path, how: str, variant: str) -> None:
    """Weights and every figure."""
    one = launched("one", train_variant, str(tmp_path / "one"), variant, whole=True, per_device_train_batch_size=4)
    several = two.run(how, train_variant, str(tmp_path / how), variant, per_device_train_batch_size=2)
    assert not one["chunks"] and all(result["chunks"] for result in several)
    if variant == "bf16":  # autocast and FSDP round at different places
        first = [result["logs"][0]["grad_norm"] for result in (one, *several)]
        assert first[1:] == [pytest.approx(first[0], rel=0.01)] * 2
        return
    assert_same_weights(one, several)
    assert_same_figures(one, several)
