"""What two processes save: an adapter that loads on one process, checkpoints that resume bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from .helpers import lora, make_dataset, make_model, make_trainer, save_model
from .hub_server import HubServer
from .processes import Processes, launched
from .test_processes import KINDS, Given, Recording, told

pytestmark = pytest.mark.dist
SETUPS = pytest.mark.parametrize(
    ("how", "state_dict"),
    [("ddp", "FULL_STATE_DICT"), ("fsdp2", "FULL_STATE_DICT"), ("fsdp2", "SHARDED_STATE_DICT")],
)


def save_after_training(folder: str, kind: str, state_dict: str) -> Any:
    trainer = make_trainer(
        Path(folder), cls=Given, max_steps=2, model=f"{folder}/base", **({"peft_config": lora()} if kind == "lora" else {})
    )
    trainer.train()
    trainer.save_model()
    return told(trainer)


@SETUPS
@KINDS
def test_what_is_saved_loads_on_one_process(two: Processes, tmp_path: Path, how: str, kind: str, state_dict: str) -> None:
    save_model(tmp_path / "base", make_model(0))
    results = two.run(
        how, save_after_training, str(tmp_path), kind, state_dict, environment={"FSDP_STATE_DICT_TYPE": state_dict}
    )
    model_class = type(make_model(0))
    if kind == "full":
        loaded = model_class.from_pretrained(tmp_path)
    else:
        assert not (tmp_path / "model.safetensors").exists()
        loaded = PeftModel.from_pretrained(model_class.from_pretrained(tmp_path / "base"), str(tmp_path))
    state = dict(loaded.named_parameters())
    for name, tensor in results[0]["weights"].items():
        assert torch.equal(state[name], tensor), name


def test_an_adapter_is_pushed_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of two processes, once; what arrives is the adapter that both hold."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    save_model(tmp_path / "base", make_model(0))
    two = Processes(2)  # the client reads the Hub's address when it is imported
    with HubServer() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": "dummy", "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        try:
            results = two.run("fsdp2", push, str(tmp_path))
        finally:
            two.stop()
    (files,) = hub.repos.values()
    assert [message for _, message in hub.commits] == ["End of training"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "arrived").mkdir(exist_ok=True)
        (tmp_path / "arrived" / name).write_bytes(files[name])
    loaded = PeftModel.from_pretrained(type(make_model(0)).from_pretrained(tmp_path / "base"), str(tmp_path / "arrived"))
    state = dict(loaded.named_parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in results[0]["weights"].items())
    assert results[0]["weights"] and b"trl_opd" in files["README.md"]


def push(folder: str) -> Any:
    trainer = make_trainer(
        Path(folder) / "run", cls=Given, max_steps=2, model=f"{folder}/base", peft_config=lora(), processing_class=None
    )
    trainer.train()
    trainer.push_to_hub()
    return told(trainer)


# ---- Resuming


def run(folder: str, kind: str, resume: str | None = None, zeroed: bool = False, **more: Any) -> Any:
    """Six steps with a checkpoint after each third; or the steps after one, from weights that are zero at first."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_substeps": 2, "learning_rate": 1e-2}
    trainer = make_trainer(
        Path(folder),
        cls=Recording,
        train_dataset=make_dataset(48),
        peft_config=lora(init_lora_weights=False) if kind == "lora" else None,
        **settings,
        **more,
    )
    if zeroed:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.zero_()
    trainer.train(resume_from_checkpoint=resume)
    shards = {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    }
    return told(trainer) | {"shards": shards}


@SETUPS
@KINDS
def test_a_resumed_run_is_the_uninterrupted_one(two: Processes, tmp_path: Path, how: str, kind: str, state_dict: str) -> None:
    """After step 3 of 6, in the middle of a rollout of two substeps: every shard of every process, bit by bit."""
    environment = {"FSDP_STATE_DICT_TYPE": state_dict}
    whole = two.run(how, run, str(tmp_path), kind, environment=environment)
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = two.run(how, run, str(tmp_path / "again"), kind, checkpoint, zeroed=True, environment=environment)
    for before, after in zip(whole, resumed, strict=True):
        assert before["shards"].keys() == after["shards"].keys()
        for name, shard in before["shards"].items():
            assert shard.abs().sum() > 0 or shard.numel() == 0
            assert torch.equal(shard, after["shards"][name]), name
        losses, again = ([log["loss"] for log in result["logs"] if "loss" in log] for result in (before, after))
        assert losses == again and len(losses) == 6
        assert after["written"] == before["written"][2:]
    assert (tmp_path / "checkpoint-3" / "distillation_state_1.pt").is_file()


def through_epochs(folder: str, resume: str | None = None) -> Any:
    """Three epochs of 20 rows, 8 a step: steps 3, 6 and 9 are the last of an epoch, and not full."""
    trainer = make_trainer(
        Path(folder),
        cls=Recording,
        train_dataset=make_dataset(20),
        max_steps=-1,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=1,
        learning_rate=1e-2,
    )
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


@pytest.mark.parametrize("step", [2, 4, 5, 6, 7])
def test_a_resumed_run_reads_the_order_of_its_epoch(two: Processes, tmp_path: Path, step: int) -> None:
    whole = two.run("ddp", through_epochs, str(tmp_path))
    resumed = two.run("ddp", through_epochs, str(tmp_path / "again"), str(tmp_path / f"checkpoint-{step}"))
    for before, after in zip(whole, resumed, strict=True):
        assert len(before["written"]) == 9
        assert after["written"] == before["written"][step:]
        for name, tensor in before["weights"].items():
            assert torch.equal(after["weights"][name], tensor), name


def test_a_process_whose_part_of_a_checkpoint_is_missing_says_so(two: Processes, tmp_path: Path) -> None:
    """As where each machine saved to a disk of its own; the first process's rollout is not this one's."""
    two.run("ddp", run, str(tmp_path), "lora")
    (tmp_path / "checkpoint-3" / "distillation_state_1.pt").unlink()
    with pytest.raises((RuntimeError, TimeoutError), match=r"lacks distillation_state_1.pt, what process 1 had rolled out"):
        two.run("ddp", run, str(tmp_path / "again"), "lora", str(tmp_path / "checkpoint-3"))


def test_an_adapters_checkpoint_holds_no_base(two: Processes, tmp_path: Path) -> None:
    """Each tensor of it is whole and bit-equal to the weights both processes hold together."""
    whole = two.run("fsdp2", run, str(tmp_path), "lora")
    (size,) = [file.stat().st_size for file in (tmp_path / "checkpoint-6").glob("pytorch_model_fsdp*")]
    trained = sum(tensor.numel() * 4 for tensor in whole[0]["weights"].values())
    assert size < 3 * trained + 20_000
    saved = torch.load(tmp_path / "checkpoint-6" / "pytorch_model_fsdp.bin", weights_only=True)
    assert len(saved) == len(whole[0]["weights"])
    for name, tensor in whole[0]["weights"].items():
        assert torch.equal(saved[name.replace(".default", "")] if name not in saved else saved[name], tensor)


@pytest.mark.parametrize("kind", ["lora"])
def test_another_number_of_processes_is_refused(two: Processes, tmp_path: Path, kind: str) -> None:
    two.run("ddp", run, str(tmp_path / "two"), kind)
    with pytest.raises(ValueError, match=r"written by 2 processes, but there are 1 now.*--num_processes 2"):
        launched("one", run, str(tmp_path / "a"), kind, str(tmp_path / "two" / "checkpoint-3"))
    launched("one", run, str(tmp_path / "one"), kind)
    with pytest.raises(RuntimeError, match=r"written by 1 processes, but there are 2 now"):
        two.run("ddp", run, str(tmp_path / "b"), kind, str(tmp_path / "one" / "checkpoint-3"))


def test_the_best_checkpoint_is_loaded_at_the_end(two: Processes, tmp_path: Path) -> None:
    """By the held-out KL; under FSDP2 the weights at the end are those of that step, on one process as on two."""
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "eval_teacher_kl", "eval_strategy": "steps"}
    settings |= {"eval_steps": 3, "eval_dataset": make_dataset(4)}
    one = launched("one", run, str(tmp_path / "one"), "lora", per_device_train_batch_size=8, **settings)
    several = two.run("fsdp2", run, str(tmp_path / "two"), "lora", per_device_train_batch_size=4, **settings)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(several[0]["weights"][name], tensor, atol=1e-3, rtol=0)
