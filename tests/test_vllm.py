"""Rollouts and teachers against real vLLM servers on the CPU."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.rollout.publisher import AdapterPublisher
from trl_opd.servers import Servers

from .helpers import lora, losses, make_dataset, make_model, make_trainer, weights
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
