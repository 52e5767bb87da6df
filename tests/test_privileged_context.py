"""Privileged context at work: a teacher that can only read the answer off its prompt teaches a student that never sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_opd import DistillationWarning

from .helpers import lora, make_trainer

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import addition  # noqa: E402

pytestmark = pytest.mark.slow


def hinted(prompts: list[str], answers: list[str]) -> list[str]:
    """The answer, then the problem: "975=123+456="."""
    return [f"{answer}={prompt}" for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def reader() -> Any:
    """A model that copies the answer from its prompt, and has forgotten how to add."""
    torch.manual_seed(0)
    tokenizer, model = addition.make_tokenizer(), AutoModelForCausalLM.from_pretrained(addition.FOLDER / "student")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    batches: Any = addition.train_prompts(200 * 64, 7).iter(64)
    for rows in batches:
        prompts = hinted(rows["prompt"], rows["answer"])
        texts = [prompt + answer + tokenizer.eos_token for prompt, answer in zip(prompts, rows["answer"], strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
        for row, prompt in enumerate(prompts):
            labels[row, : len(prompt)] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def accuracy(model: Any, *, hint: bool = False) -> float:
    """Greedy, on problems that no model was trained on."""
    rows = addition.heldout(500)[:]
    prompts = hinted(rows["prompt"], rows["answer"]) if hint else rows["prompt"]
    return addition.accuracy(addition.solve(model, addition.make_tokenizer(), prompts), rows["answer"])


def distilled(folder: Path, reader: Any, *, hint: bool) -> Any:
    """The student after 80 steps; the teacher sees the answers or does not."""
    rows = addition.train_prompts(80 * 128, 3)[:]
    columns = {"prompt": rows["prompt"]}
    if hint:
        columns["teacher_prompt"] = hinted(rows["prompt"], rows["answer"])
    trainer = make_trainer(
        folder,
        model=AutoModelForCausalLM.from_pretrained(addition.FOLDER / "student"),
        teacher_model=reader,
        processing_class=addition.make_tokenizer(),
        train_dataset=datasets.Dataset.from_dict(columns),
        peft_config=lora(r=32, lora_alpha=64),
        per_device_train_batch_size=128,
        max_completion_length=addition.MAX_COMPLETION_LENGTH,
        max_steps=80,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
    )
    trainer.train()
    return trainer.student().eval()


def test_a_student_learns_what_its_teacher_reads_off_the_prompt(tmp_path: Path, reader: Any) -> None:
    before = accuracy(AutoModelForCausalLM.from_pretrained(addition.FOLDER / "student"))
    assert accuracy(reader, hint=True) > 0.95 and accuracy(reader) < 0.1
    after = accuracy(distilled(tmp_path / "hinted", reader, hint=True))
    print(f"held-out accuracy: {before:.3f} before, {after:.3f} after; the teacher {accuracy(reader):.3f} without the answer")
    assert after > before + 0.15
    with pytest.warns(DistillationWarning, match="no better than guessing among 14 ids"):  # and that is what is wrong
        without = accuracy(distilled(tmp_path / "plain", reader, hint=False))
    print(f"from the same teacher without the answers: {without:.3f}")
    assert without < before
