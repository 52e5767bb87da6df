"""Rollouts and teachers against real vLLM servers on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import one_server
import pytest
import torch
from heal_pruned import load_smollm2, questions
from peft import get_peft_model

from trl_opd import OnPolicyDistillationTrainer

from .helpers import lora, losses, make_dataset, make_model, make_trainer, weights
from .test_examples import figure, run
from .vllm_server import VLLMServer, tiny_model

pytestmark = pytest.mark.vllm


class Recording(OnPolicyDistillationTrainer):
    """Notes, for each rollout, its log-probs and the trainer's own of the same weights."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
        rollout = super().generate_rollout(rows)
        self.gaps: list[float] = [*vars(self).get("gaps", [])]
        gap_BT = (self.student_logps(rollout) - rollout.sampled_logps_BT)[rollout.mask_BT].abs()
        self.gaps.append(float(gap_BT.max()))
        self.rollouts = [*vars(self).get("rollouts", []), rollout]
        return rollout


def vllm_trainer(folder: Path, server: VLLMServer, **more: Any) -> Any:
    """A trainer whose student is the tiny model that the server has."""
    settings = {
        "cls": Recording,
        "model": tiny_model(),
        "peft_config": lora(),
        "rollout_engine": "vllm",
        "vllm_server_base_url": [server.url],
        "vllm_server_timeout": 120.0,
        "max_completion_length": 12,
    }
    return make_trainer(folder, **{**settings, **more})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_the_trainers_before_and_after_updates(
    tiny_server: VLLMServer, tmp_path: Path, temperature: float
) -> None:
    """In each of five steps; the checkpoint's top_k, temperature, penalty and padding rows play no part."""
    trainer = vllm_trainer(tmp_path, tiny_server, max_steps=5, temperature=temperature, per_device_train_batch_size=16)
    trainer.train()
    assert len(trainer.gaps) == 5
    assert max(trainer.gaps) < 1e-4
    ids = torch.cat([rollout.ids_BT[rollout.mask_BT] for rollout in trainer.rollouts])
    assert int(ids.max()) < 43
    assert len(ids.unique()) > 20
    for rollout in trainer.rollouts:
        for row, stopped in zip(rollout.completion_ids(), rollout.stopped_B.tolist(), strict=True):
            assert (row[-1] in (1, 7)) == stopped
            assert stopped or len(row) == 12
            assert not set(row[:-1]) & {1, 7}
    assert all(entry["time/sync"] > 0 for entry in trainer.state.log_history if "loss" in entry)


def test_rollouts_written_while_a_step_trains(tiny_server: VLLMServer, tmp_path: Path) -> None:
    """Each version passes the probe; the ratio, to weights a step older, is near 1 and not 1."""
    trainer = vllm_trainer(
        tmp_path, tiny_server, cls=OnPolicyDistillationTrainer, rollout_lag=1, max_steps=5, train_dataset=make_dataset(80)
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rollout/staleness"] for entry in logs] == [0, 1, 1, 1, 1]
    assert logs[0]["sampler_kl/v2"] < 1e-8 < min(entry["sampler_kl/v2"] for entry in logs[1:])
    assert all(0.5 < entry["ratio/mean"] < 2 for entry in logs)


def test_truncated_sampling_is_scored_by_the_whole_softmax(tiny_server: VLLMServer, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="truncated distribution"):
        trainer = vllm_trainer(tmp_path, tiny_server, top_k=2, max_steps=1, learning_rate=1e-9)
    trainer.train()
    (rollout,) = trainer.rollouts
    logits = trainer.student()(input_ids=rollout.ids_BT, attention_mask=rollout.attention_mask_BT.long()).logits[:, :-1, :43]
    ranks = (logits > logits.gather(2, rollout.ids_BT[:, 1:, None].clamp(max=42))).sum(-1)[rollout.mask_BT[:, 1:]]
    assert int(ranks.max()) <= 1
    assert trainer.gaps[0] > 0.1  # of what the server says
    assert trainer.state.log_history[0]["sampler_kl/v2"] < 1e-9  # of what is trained on


def test_a_resumed_run_publishes_before_its_first_rollout(tiny_server: VLLMServer, tmp_path: Path) -> None:
    whole = vllm_trainer(tmp_path / "whole", tiny_server, max_steps=4, learning_rate=0.02)
    whole.train()
    first = vllm_trainer(tmp_path / "cut", tiny_server, max_steps=2, learning_rate=0.02, save_strategy="steps", save_steps=2)
    first.train()
    second = vllm_trainer(tmp_path / "cut", tiny_server, max_steps=4, learning_rate=0.02)
    second.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-2"))
    assert len(second.gaps) == 2
    assert max(second.gaps) < 1e-4
    assert losses(second)[-2:] == pytest.approx(losses(whole)[-2:], rel=1e-3)


def test_a_version_never_reads_the_cached_prefix_of_another(tiny_server: VLLMServer, tmp_path: Path) -> None:
    """One prompt, longer than a block of vLLM's cache (128 tokens), before and after an update; each twice."""
    prompt = "".join("0123456789+= abcdefghijklmnopqrstuvwxyz"[i * 17 % 39] for i in range(200))
    data = make_dataset(1).map(lambda row: {"prompt": prompt})
    settings = {"train_dataset": data, "num_generations": 4, "max_steps": 3, "learning_rate": 0.05}
    settings["teacher_model"] = make_model(1, max_position_embeddings=256)
    trainer = vllm_trainer(tmp_path, tiny_server, **settings)
    trainer.train()
    assert len(trainer.gaps) == 3
    assert max(trainer.gaps) < 1e-4
    assert all(len(row) > 200 for row in trainer.rollouts[0].ids_BT.tolist())


def test_a_server_that_is_killed_and_started_again_gets_the_adapter_again(tiny_server: VLLMServer, tmp_path: Path) -> None:
    """It is killed while the third step is rolled out, and loses every adapter; the run waits for it and goes on."""

    class Killing(Recording):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
            if self.state.global_step == 2:
                tiny_server.stop()
                tiny_server.start(wait=False)
            return super().generate_rollout(rows)

    trainer = vllm_trainer(tmp_path, tiny_server, cls=Killing, max_steps=4, learning_rate=0.02)
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(trainer.gaps) == 4
    assert max(trainer.gaps) < 1e-4


def test_a_server_with_another_base_is_refused(tiny_server: VLLMServer, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"is not the student's base: .* differ by \d"):
        vllm_trainer(tmp_path, tiny_server, model=model).train()


def test_an_adapter_that_the_server_cannot_hold_is_told_in_its_words(tiny_server: VLLMServer, tmp_path: Path) -> None:
    trainer = vllm_trainer(tmp_path, tiny_server, peft_config=lora(r=64), vllm_server_timeout=3.0)
    with pytest.raises(Exception, match="LoRA rank 64 is greater than max_lora_rank 32"):
        trainer.train()


# ---- SmolLM2-135M


@pytest.mark.slow
def test_a_real_models_log_probs_before_and_after_updates(smollm2_server: VLLMServer, tmp_path: Path) -> None:
    """Of the student on the server, and of the teacher, which is that server's base: the student without its adapter."""
    base, tokenizer = load_smollm2()
    student = get_peft_model(base, lora(r=32, lora_alpha=64, target_modules=one_server.LINEAR))
    one_server.harm(student, strength=0.1)
    trainer = make_trainer(
        tmp_path,
        cls=Recording,
        model=student,
        teacher_model=f"{smollm2_server.url}#base",
        processing_class=tokenizer,
        train_dataset=questions()[0],
        rollout_engine="vllm",
        vllm_server_base_url=[smollm2_server.url],
        max_completion_length=16,
        max_steps=5,
        learning_rate=1e-3,
    )
    before = weights(trainer.student())
    trainer.train()
    assert len(trainer.gaps) == 5
    assert max(trainer.gaps) < 1e-4
    moved = [float((p - before[name]).abs().max()) for name, p in trainer.student().named_parameters() if p.requires_grad]
    assert max(moved) > 1e-3
    for rollout in trainer.rollouts:
        with trainer.student().disable_adapter():
            own_BT = trainer.student_logps(rollout)
        gap_BT = (trainer.score_with_teacher(rollout) - own_BT).abs()
        assert float(gap_BT[rollout.mask_BT].max()) < 1e-4
    assert trainer.state.log_history[0]["teacher_kl"] > 0.01  # not the student


@pytest.mark.slow
def test_one_server_for_everything(smollm2_server: VLLMServer, tmp_path: Path) -> None:
    output = run("one_server.py", "--server", smollm2_server.url, "--max_steps", "4", folder=tmp_path)
    assert figure(r"\((\S+) of the start\)", output) < 1
    assert (tmp_path / "recovered-smollm2/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_heal_pruned_with_its_teacher_on_a_server(smollm2_server: VLLMServer, tmp_path: Path) -> None:
    """The figures are those of the teacher in process: the same before the first update, and alike after.

    Adam makes whole steps of gradients that are next to nothing, whose sign rounding turns, so that runs part from there.
    """
    options = ("--max_steps", "2", "--eval_prompts", "8")
    pattern = r"nats a token: (\S+) -> (\S+)"
    there = run("heal_pruned.py", *options, "--teacher", f"{smollm2_server.url}#base", folder=tmp_path)
    here = run("heal_pruned.py", *options, folder=tmp_path)
    found = [[float(kl) for kl in re.findall(pattern, output)[0]] for output in (there, here)]
    assert found[0][0] == pytest.approx(found[1][0], abs=0.002)
    assert found[0][1] == pytest.approx(found[1][1], abs=0.4)
    assert found[0][1] < found[0][0] - 0.3 and found[1][1] < found[1][0] - 0.3
