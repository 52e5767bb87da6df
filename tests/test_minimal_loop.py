"""The trainer against `examples/minimal_loop.py`, which shares no code with it: from the same completions the same numbers."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import TrainerCallback

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.batch import Completion, Rollout, ScoredBatch

from .helpers import lora, make_dataset, make_model, make_tokenizer, make_trainer, weights

EXAMPLES = Path(__file__).parent.parent / "examples"
STOP, PAD, LONGEST, STEPS, BATCH = 1, 0, 6, 3, 4
PROMPTS = make_dataset(BATCH * STEPS)["prompt"][:]


@pytest.fixture(scope="module")
def loop() -> Any:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("minimal_loop", EXAMPLES / "minimal_loop.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["minimal_loop"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def encoded() -> list[list[int]]:
    prompts = make_tokenizer()(PROMPTS)["input_ids"]
    assert len({len(prompt) for prompt in prompts}) > 1
    return prompts  # type: ignore[return-value]


def student_model(dtype: torch.dtype, adapted: bool) -> Any:
    """With a stop token likely enough that completions are ragged."""
    model: Any = make_model(0, dtype=dtype)
    model.get_output_embeddings().weight.data[STOP] *= 3
    if not adapted:
        return model
    torch.manual_seed(0)
    return get_peft_model(model, lora(init_lora_weights=False))


class Reader(OnPolicyDistillationTrainer):
    """Writes the completions it is given (if any), and keeps what it computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: list[list[list[int]]] = []
        self.written: list[Rollout] = []
        self.batches: list[ScoredBatch] = []

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        if not self.given:
            self.written.append(super().generate_rollout(rows))
            return self.written[-1]
        rollout = Rollout.build(
            [self.prompt_encoder.encode(row) for row in rows],
            [Completion(ids, [0.0] * len(ids), ids[-1] == STOP) for ids in self.given.pop(0)],
            rows,
            pad_id=PAD,
            device=self.args.device,
        )
        self.written.append(rollout.with_sampled_logps(self.student_logps(rollout)))
        return self.written[-1]

    def scored_batch(self, rows: list[dict[str, Any]], *written: Any) -> ScoredBatch:
        self.batches.append(super().scored_batch(rows, *written))
        return self.batches[-1]


class Gradients(TrainerCallback):
    """Keeps each step's gradients as the optimizer gets them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:  # pyright: ignore
        self.steps.append(gradients(model))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def make_reader(folder: Path, student: Any, dtype: torch.dtype, **settings: Any) -> tuple[Any, Gradients]:
    """A trainer whose settings are those of the loop."""
    recorder = Gradients()
    defaults = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "sequential",
    }
    trainer = make_trainer(
        folder,
        cls=Reader,
        model=student,
        teacher_model=make_model(1, dtype=dtype),
        train_dataset=make_dataset(len(PROMPTS)),
        max_completion_length=LONGEST,
        callbacks=[recorder],
        **{**defaults, **settings},
    )
    return trainer, recorder


def run_loop(loop: Any, student: Any, dtype: torch.dtype, write: Any, **settings: Any) -> tuple[list[Any], list[Any]]:
    """The loop's updates, and its gradients at each, after `STEPS` steps."""
    updates, steps = [], []
    prompts = encoded()[: STEPS * BATCH]
    teacher = make_model(1, dtype=dtype)
    for update in loop.distill(
        student, teacher, prompts, write=write, pad=PAD, batch_size=BATCH, learning_rate=1e-2, **settings
    ):
        updates.append(update)
        steps.append(gradients(student))
    return updates, steps


def assert_same(trainer: Any, recorder: Gradients, student: Any, updates: list[Any], steps: list[Any], atol: float) -> None:
    """Same tokens, scores, advantages, losses, gradients and weights."""

    def close(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one.to(other.dtype), other, atol=atol, rtol=0)

    for name in ("ids_BT", "sampled_logps_BT", "teacher_logps_BT", "advantages_BT"):
        mine = [getattr(batch, name)[batch.mask_BT] for batch in trainer.batches]
        tensors = [u.batch.ids_BT if name == "ids_BT" else getattr(u, name) for u in updates]
        theirs = [tensor[u.batch.action_BT] for tensor, u in zip(tensors, updates, strict=True)]
        close(torch.cat(mine), torch.cat(theirs))
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([update.loss for update in updates], abs=max(atol, 1e-6), rel=1e-6)  # Trainer's are fp32
    assert len(recorder.steps) == len(steps) == len(updates)
    for mine, theirs in zip(recorder.steps, steps, strict=True):
        assert mine.keys() == theirs.keys()
        assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-2
        for name, gradient in theirs.items():
            close(mine[name], gradient)
    final = weights(student)
    for name, value in weights(trainer.model).items():
        close(value, final[name])


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("settings", "loop_settings"),
    [
        ({}, {}),
        ({"kl_discount_factor": 0.7, "temperature": 0.8}, {"discount": 0.7, "temperature": 0.8}),
        ({"num_substeps": 3}, {"num_substeps": 3}),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, {}),
    ],
    ids=["plain", "discount and temperature", "substeps", "accumulation"],
)
def test_given_the_loops_completions_the_trainer_computes_the_same(
    tmp_path: Path, loop: Any, adapted: bool, settings: dict[str, Any], loop_settings: dict[str, Any]
) -> None:
    """Float64, three steps: all figures and weights to 1e-11."""
    written: list[list[list[int]]] = []

    def write(model: Any, prompts: list[list[int]]) -> list[list[int]]:
        temperature = loop_settings.get("temperature", 1.0)
        written.append(loop.write(model, prompts, stop=STOP, pad=PAD, longest=LONGEST, temperature=temperature))
        return written[-1]

    torch.manual_seed(0)
    student = student_model(torch.float64, adapted)
    before = weights(student)
    updates, steps = run_loop(loop, student, torch.float64, write, **loop_settings)
    assert len({len(ids) for rows in written for ids in rows}) >= 3
    assert max(float((value - before[name]).abs().max()) for name, value in weights(student).items()) > 1e-2

    trainer, recorder = make_reader(tmp_path, student_model(torch.float64, adapted), torch.float64, **settings)
    trainer.given = written.copy()
    trainer.train()
    assert not trainer.given
    assert_same(trainer, recorder, student, updates, steps, atol=1e-11)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_in_fp32_they_agree_to_rounding(tmp_path: Path, loop: Any, adapted: bool) -> None:
    """The trainer writes, and its log-probs are those it noted while sampling; the loop reads the same completions."""
    trainer, recorder = make_reader(tmp_path, student_model(torch.float32, adapted), torch.float32, max_grad_norm=1.0)
    trainer.train()
    written = [rollout.completion_ids() for rollout in trainer.written]
    student = student_model(torch.float32, adapted)
    updates, steps = run_loop(loop, student, torch.float32, lambda *_: written.pop(0))
    assert_same(trainer, recorder, student, updates, steps, atol=5e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completions_are_drawn_as_worked_out_token_by_token(tmp_path: Path, temperature: float) -> None:
    """Each from the softmax at the temperature, and from the random numbers of its own place; no batch, no cache."""
    trainer, _ = make_reader(tmp_path, student_model(torch.float32, False), torch.float32, temperature=temperature)
    trainer.scored_batch([{"prompt": prompt} for prompt in PROMPTS])
    model = student_model(torch.float32, False).eval()
    completions = []
    for place, prompt in enumerate(encoded()):
        seed = np.random.SeedSequence((trainer.args.seed, 0, 0, place)).generate_state(1, np.uint64)[0] // 2
        numbers = np.random.default_rng(int(seed)).random(LONGEST)
        ids: list[int] = []
        while len(ids) < LONGEST and STOP not in ids:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, -1]
            probabilities = (logits / temperature).softmax(-1).tolist()
            reached = [total >= 1 - float(numbers[len(ids)]) for total in itertools.accumulate(probabilities)]
            ids.append(reached.index(True))
        completions.append(ids)
    assert trainer.written[0].completion_ids() == completions
    assert len({tuple(ids) for ids in completions}) > len(completions) / 2


# ---- The loop itself, by hand


def test_the_loops_stop_token_is_an_action_though_it_pads(loop: Any) -> None:
    batch = loop.pack([[5, 6], [7]], [[1], [8, 9, 1]], pad=1)
    assert batch.ids_BT.tolist() == [[5, 6, 1, 1, 1], [1, 7, 8, 9, 1]]
    assert batch.real_BT.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.action_BT.int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]


def test_the_loops_advantages_by_hand(loop: Any) -> None:
    student, teacher = torch.zeros(1, 5), torch.tensor([[9.0, -1.0, 2.0, -4.0, 9.0]])
    action = torch.tensor([[0, 1, 1, 1, 0]]).bool()
    assert loop.kl_advantages(student, teacher, action, 0.0).tolist() == [[0, -1, 2, -4, 0]]
    assert loop.kl_advantages(student, teacher, action, 0.5).tolist() == [[0, -1, 0, -4, 0]]


def test_the_loop_imports_nothing_of_the_package() -> None:
    assert "import trl_opd" not in (source := (EXAMPLES / "minimal_loop.py").read_text())
    assert "from trl_opd" not in source
