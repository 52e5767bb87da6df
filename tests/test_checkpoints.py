"""A checkpoint brings back the very run it was taken from, and holds an adapter that others can load."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_opd.models import TEACHER_ADAPTER

from .helpers import lora, losses, make_dataset, make_model, make_tokenizer, make_trainer, save_model, weights

IDS = torch.tensor([[10, 15, 4, 7, 20, 33]])


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward: the number of digits and, so that groups rarely tie, a little for length."""
    return [sum(c.isdigit() for c in text) + 0.1 * len(text) for text in completions]


class Killed(Exception):
    """Stands for whatever ends a process."""


class KillAfterSave(TrainerCallback):
    """Ends a run when the checkpoint of a step has been written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def trainer(folder: Path, dataset: datasets.Dataset | datasets.IterableDataset, **more: Any) -> Any:
    """Six steps of 2 x 2 completions, a rollout every second step, rewards, a schedule, a checkpoint a step."""
    settings: dict[str, Any] = {
        "train_dataset": dataset,
        "reward_funcs": digits,
        "peft_config": lora(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "num_substeps": 2,
        "max_steps": 6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    return make_trainer(folder, **{**settings, **more})


def resumed(folder: Path, dataset: Any, checkpoint: str | bool, **more: Any) -> Any:
    """The run of a new trainer from a checkpoint on, in a process whose random state is another."""
    run = trainer(folder, dataset, **more)
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    run.train(resume_from_checkpoint=checkpoint)
    return run


def figures(run: Any) -> list[dict[str, Any]]:
    """All that was logged at each step, but for what a clock measured and the summary at the end."""
    steps = [entry for entry in run.state.log_history if "train_runtime" not in entry]
    return [{k: v for k, v in entry.items() if not k.startswith(("time/", "tokens_per_second"))} for entry in steps]


def assert_same(one: Any, other: Any) -> None:
    """Equality bit for bit, tensors inside included."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_same_run(whole: Any, other: Any) -> None:
    """Logs, weights, optimizer and schedule are equal bit for bit, after as many steps."""
    assert [entry["step"] for entry in figures(whole)] == list(range(1, whole.args.max_steps + 1))
    assert_same(figures(whole), figures(other))
    assert_same(weights(whole.model), weights(other.model))
    assert_same(whole.optimizer.state_dict(), other.optimizer.state_dict())
    assert_same(whole.lr_scheduler.state_dict(), other.lr_scheduler.state_dict())


def stream(num_rows: int) -> datasets.IterableDataset:
    """The prompts of `make_dataset`, one after the other."""
    return make_dataset(num_rows).to_iterable_dataset()


DATASETS: dict[str, Callable[[], Any]] = {
    "8 prompts": lambda: make_dataset(8),  # 4 steps an epoch: rollouts of steps 1-2, 3-4 | 5-6
    "5 prompts": lambda: make_dataset(5),  # 3 steps an epoch, the last a half: rollouts of steps 1-2, 3 | 4-5, 6
    "stream": lambda: stream(24).shuffle(seed=1, buffer_size=5),
    "short stream": lambda: stream(6),  # 3 steps a pass
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs without interruption, each trained once: `whole(name of the data, lora or not)`."""

    @cache
    def run(name: str, adapter: bool = True) -> Any:
        one = trainer(tmp_path_factory.mktemp("whole"), DATASETS[name](), **({} if adapter else {"peft_config": None}))
        one.train()
        return one

    return run


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("8 prompts", 3, id="half of a rollout used"),
        pytest.param("8 prompts", 4, id="rollout and epoch end"),
        pytest.param("8 prompts", 5, id="half of a rollout used in the second epoch", marks=pytest.mark.slow),
        pytest.param("5 prompts", 2, id="rollout ends before the epoch's last, smaller step", marks=pytest.mark.slow),
        pytest.param("5 prompts", 3, id="short rollout at the end of the epoch", marks=pytest.mark.slow),
        pytest.param("5 prompts", 4, id="half of a rollout used after an epoch with a smaller step"),
        pytest.param("stream", 3, id="shuffled stream, half of a rollout used"),
        pytest.param("stream", 4, id="shuffled stream, rollout ends", marks=pytest.mark.slow),
        pytest.param("short stream", 3, id="end of a stream's first pass", marks=pytest.mark.slow),
        pytest.param("short stream", 4, id="half of a rollout used in a stream's second pass"),
    ],
)
def test_resume_equals_no_interruption(whole: Any, tmp_path: Path, name: str, step: int) -> None:
    checkpoint = f"{whole(name).args.output_dir}/checkpoint-{step}"
    assert_same_run(whole(name), resumed(tmp_path, DATASETS[name](), checkpoint))


@pytest.mark.parametrize("step", [3, 4])
def test_resume_of_full_weights_equals_no_interruption(whole: Any, tmp_path: Path, step: int) -> None:
    run = whole("8 prompts", adapter=False)
    checkpoint = f"{run.args.output_dir}/checkpoint-{step}"
    assert_same_run(run, resumed(tmp_path, DATASETS["8 prompts"](), checkpoint, peft_config=None))


def test_a_killed_run_resumes_from_its_last_checkpoint(whole: Any, tmp_path: Path) -> None:
    killed = trainer(tmp_path, DATASETS["8 prompts"](), callbacks=[KillAfterSave(3)])
    with pytest.raises(Killed):
        killed.train()
    assert killed.state.global_step == 3
    assert_same_run(whole("8 prompts"), resumed(tmp_path, DATASETS["8 prompts"](), True))


def test_a_killed_run_can_be_taken_up_by_the_same_trainer(whole: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, DATASETS["8 prompts"](), callbacks=[KillAfterSave(3)])
    with pytest.raises(Killed):
        run.train()
    run.pop_callback(KillAfterSave)
    run.train(resume_from_checkpoint=True)
    assert_same_run(whole("8 prompts"), run)


def test_a_run_begun_anew_does_not_train_on_the_rollout_of_the_one_before(tmp_path: Path) -> None:
    """The same trainer, stopped within a rollout and started again from step 0, samples anew from its present weights."""
    run = trainer(tmp_path, make_dataset(8), callbacks=[KillAfterSave(1)], save_strategy="steps")
    with pytest.raises(Killed):
        run.train()
    run.pop_callback(KillAfterSave)
    run.args.max_steps = 1
    run.train()
    ratio = figures(run)[-1]["ratio/max"]
    assert ratio == pytest.approx(1.0, abs=1e-5)  # a rollout of the very weights that are updated
    assert run.progress.tokens == figures(run)[-1]["tokens"] < 30  # 4 completions of 6 tokens at most, counted from 0


def test_more_steps_than_planned_go_on_in_the_stream_where_it_was(tmp_path: Path) -> None:
    """A run of 2 steps, continued to 4, reads the stream's rows 5 to 8 next, not its beginning."""

    def run(folder: Path, max_steps: int, resume: bool) -> Any:
        one = trainer(folder, stream(24), max_steps=max_steps, lr_scheduler_type="constant")
        one.train(resume_from_checkpoint=resume or None)
        return one

    whole = run(tmp_path / "whole", 4, False)
    run(tmp_path / "parts", 2, False)
    assert_same(losses(whole), losses(run(tmp_path / "parts", 4, True)))


def test_the_incomplete_step_at_a_streams_end_leaves_no_gradient_behind(tmp_path: Path) -> None:
    """5 prompts x 2 make two steps and a half of one. What the half would add must not turn up in the next pass."""
    four, five = (trainer(tmp_path, stream(n), save_strategy="no", max_steps=4) for n in (4, 5))
    four.train()
    five.train()
    assert_same(weights(four.model), weights(five.model))


def test_the_token_count_goes_on_where_it_was(whole: Any, tmp_path: Path) -> None:
    """Also if the checkpoint lies between two logs: with a log every 4 steps, step 2's tokens are not logged yet."""
    counts = {}
    for name, checkpoint in {"whole": None, "resumed": "whole/checkpoint-2"}.items():
        run = trainer(tmp_path / name, make_dataset(8), logging_steps=4, save_steps=2, num_substeps=1, max_steps=4)
        run.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        counts[name] = {k: run.state.log_history[-2][k] for k in ("tokens", "teacher_tokens")}
    assert counts["whole"] == counts["resumed"]
    assert counts["whole"]["tokens"] > 16


# ---- What is saved


def test_an_adapter_checkpoint_holds_no_base_weights(whole: Any) -> None:
    folder = Path(whole("8 prompts").args.output_dir) / "checkpoint-3"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "distillation_state_0.pt",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
        "training_args.bin",
    ]
    trainable = sum(p.numel() for p in whole("8 prompts").model.parameters() if p.requires_grad)
    assert 4 * trainable < (folder / "adapter_model.safetensors").stat().st_size < 4 * trainable + 8_000  # fp32, header


def test_a_saved_adapter_gives_the_trainers_logits(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", make_model(0))
    run = trainer(tmp_path / "run", make_dataset(8), model=base, processing_class=None, max_steps=2, save_strategy="no")
    run.train()
    run.save_model()
    with torch.no_grad():
        expected = run.model.eval()(IDS).logits
        assert (expected - make_model(0)(IDS).logits).abs().max() > 1e-2  # it has learned something
        for loaded in (
            AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run"),
            PeftModel.from_pretrained(make_model(0), str(tmp_path / "run")),
        ):
            assert torch.equal(loaded.eval()(IDS).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab() == make_tokenizer().get_vocab()


# ---- Starting from an adapter


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """An adapter that does something, on a saved base."""
    base = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "base", make_model(0)))
    model = get_peft_model(base, lora())
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    return str(tmp_path / "adapter")


def given(adapter: str, as_model: bool) -> Any:
    """The adapter as a path, or loaded to be trained on."""
    return PeftModel.from_pretrained(base_of(adapter), adapter, is_trainable=True) if as_model else adapter


def base_of(adapter: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(Path(adapter).parent / "base")


@pytest.mark.parametrize("as_model", [False, True], ids=["path", "PeftModel"])
def test_training_goes_on_from_an_adapter_with_a_fresh_optimizer(adapter: str, tmp_path: Path, as_model: bool) -> None:
    student = given(adapter, as_model)
    run = trainer(
        tmp_path / "run",
        make_dataset(8),
        model=student,
        peft_config=None,
        processing_class=None if not as_model else make_tokenizer(),
    )
    file = load_file(f"{adapter}/adapter_model.safetensors")
    before = {name.replace(".default", ""): tensor for name, tensor in weights(run.model).items() if "lora" in name}
    assert_same(before, file)
    base = {name: tensor for name, tensor in weights(run.model).items() if "lora" not in name}
    run.train()

    after = {name.replace(".default", ""): tensor for name, tensor in weights(run.model).items() if "lora" in name}
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert_same({name: tensor for name, tensor in weights(run.model).items() if "lora" not in name}, base)
    states = run.optimizer.state_dict()["state"].values()
    assert len(states) == len(before)
    assert {float(state["step"]) for state in states} == {6.0}  # its own six and none of an earlier run
    assert figures(run)[0]["step"] == 1

    loaded = PeftModel.from_pretrained(base_of(adapter), str(tmp_path / "run" / "checkpoint-6"))
    assert torch.equal(loaded.eval()(IDS).logits, run.model.eval()(IDS).logits)


def test_an_adapter_by_path_and_as_a_model_train_alike(adapter: str, tmp_path: Path) -> None:
    runs = [
        trainer(
            tmp_path,
            make_dataset(8),
            model=given(adapter, as_model),
            peft_config=None,
            max_steps=2,
            processing_class=make_tokenizer(),
        )
        for as_model in (False, True)
    ]
    for run in runs:
        run.train()
    assert_same(losses(runs[0]), losses(runs[1]))
    assert_same(weights(runs[0].model), weights(runs[1].model))


def test_a_frozen_adapter_is_an_error(adapter: str, tmp_path: Path) -> None:
    frozen = PeftModel.from_pretrained(base_of(adapter), adapter)
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        trainer(tmp_path, make_dataset(8), model=frozen, peft_config=None)


def test_resume_with_a_teacher_adapter_on_the_same_base(adapter: str, tmp_path: Path) -> None:
    """The teacher is in no checkpoint, and the student's weights are not loaded into it."""
    settings = {
        "model": str(Path(adapter).parent / "base"),
        "teacher_model": adapter,
        "processing_class": None,
        "max_steps": 4,
    }
    whole = trainer(tmp_path / "whole", make_dataset(8), **settings)
    teacher = {name: tensor for name, tensor in weights(whole.model).items() if TEACHER_ADAPTER in name}
    assert teacher
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == []
    other = resumed(tmp_path / "other", make_dataset(8), str(checkpoint), **settings)
    assert_same_run(whole, other)
    assert_same({name: tensor for name, tensor in weights(other.model).items() if TEACHER_ADAPTER in name}, teacher)
