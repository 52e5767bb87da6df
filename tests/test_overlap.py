"""A rollout that servers write while the step before it trains (`rollout_lag`), on the fake server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import get_peft_model
from torch import Tensor

from trl_opd import OnPolicyDistillationTrainer, Rollout, ScoredBatch
from trl_opd.servers import ServerError

from .fake_vllm import FakeVLLM, requests_ended
from .helpers import lora, losses, make_config, make_dataset, make_model, make_trainer
from .test_errors import assert_error
from .test_tools import tool_trainer

LOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/completions"
ROWS = 8


class Recording(OnPolicyDistillationTrainer):
    """Keeps, of each optimizer step, the adapter before it and the batch; says when a step begins."""

    server: FakeVLLM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[dict[str, Tensor], ScoredBatch]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        adapter = {name: p.detach().clone() for name, p in self.student().named_parameters() if p.requires_grad}
        self.steps.append((adapter, inputs))
        if isinstance(self.server, Gated):
            self.server.steps_begun.release()
        return super().training_step(model, inputs, num_items_in_batch)


class Gated(FakeVLLM):
    """Answers for the completions of step n + 1 only once step n has begun to train."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps_begun = threading.Semaphore(0)
        self.asked = 0

    def completions(self, payload: dict[str, Any]) -> tuple[int, Any]:
        if writes(COMPLETIONS, payload):
            with self._counting:
                self.asked += 1
                first_of_step = self.asked > ROWS and self.asked % ROWS == 1
            if first_of_step and not self.steps_begun.acquire(timeout=20):
                return 500, {"detail": "the step before did not begin"}
        return super().completions(payload)


def writes(path: str, payload: dict[str, Any]) -> bool:
    """Whether a request is for a completion, and not for scores or a probe."""
    return path == COMPLETIONS and "logit_bias" in payload


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(make_model(0), logprobs_mode="processed_logprobs") as fake:
        yield fake


def make(folder: Path, server: FakeVLLM, **more: Any) -> Any:
    settings = {
        "cls": Recording,
        "peft_config": lora(),
        "rollout_engine": "vllm",
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 5.0,
        "rollout_lag": 1,
        "max_prompt_length": 32,
        "max_steps": 5,
        "train_dataset": make_dataset(80),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
    }
    trainer = make_trainer(folder, **{**settings, **more})
    trainer.server = server
    return trainer


def logs(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def gap(trainer: Any, adapter: dict[str, Tensor], batch: ScoredBatch) -> float:
    """How far a batch's log-probs are from those of an adapter, at most."""
    trainer.student().load_state_dict(adapter, strict=False)
    return float((trainer.student_logps(batch) - batch.sampled_logps_BT)[batch.mask_BT].abs().max())


def prompts(batch: ScoredBatch) -> list[list[int]]:
    starts = batch.mask_BT.int().argmax(dim=1).tolist()
    return [row[:start] for row, start in zip(batch.ids_BT.tolist(), starts, strict=True)]


# ---- What is sampled when


def test_the_next_rollout_is_written_while_a_step_trains(tmp_path: Path) -> None:
    """The server gives no completion for a step before the step before it has begun: one after the other would never end."""
    server = Gated(make_model(0))
    with server:
        trainer = make(tmp_path, server)
        trainer.train()
    assert len(trainer.steps) == 5 and server.asked == 5 * ROWS


def test_completions_are_of_the_weights_one_step_before(server: FakeVLLM, tmp_path: Path) -> None:
    trainer = make(tmp_path, server)
    trainer.train()
    assert [entry["rollout/staleness"] for entry in logs(trainer)] == [0, 1, 1, 1, 1]
    for step, (adapter, batch) in enumerate(list(trainer.steps)):
        before = trainer.steps[max(0, step - 1)][0]
        assert gap(trainer, before, batch) < 1e-5
        if step:
            assert gap(trainer, adapter, batch) > 1e-3
    assert logs(trainer)[0]["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert all(entry["ratio/max"] > 1.001 for entry in logs(trainer)[1:])


def test_with_substeps_it_is_one_rollout_late(server: FakeVLLM, tmp_path: Path) -> None:
    trainer = make(tmp_path, server, num_substeps=2)
    trainer.train()
    assert [entry["rollout/staleness"] for entry in logs(trainer)] == [0, 1, 2, 3, 2]
    sources = [0, 0, 0, 0, 2]
    for source, (_, batch) in zip(sources, list(trainer.steps), strict=True):
        assert gap(trainer, trainer.steps[source][0], batch) < 1e-5
    assert sum(writes(*request) for request in server.requests) == 5 * ROWS, "nothing is written that no step trains on"


@pytest.mark.parametrize(("substeps", "staleness"), [(1, [0, 1, 1]), (2, [0, 1, 2])])
def test_rows_and_seeds_are_those_of_a_strict_run(
    server: FakeVLLM, tmp_path: Path, substeps: int, staleness: list[int]
) -> None:
    """Three epochs of two and a half steps."""
    asked = []
    for lag in (0, 1):
        server.requests.clear()
        data = {"train_dataset": make_dataset(20), "max_steps": -1, "num_train_epochs": 3}
        trainer = make(tmp_path / str(lag), server, rollout_lag=lag, num_substeps=substeps, **data)
        trainer.train()
        asked.append(sorted((p["prompt"], p["seed"]) for path, p in server.requests if writes(path, p)))
    logged = [entry["rollout/staleness"] for entry in logs(trainer)]
    assert logged == staleness * 3, "a pass through the data begins with a rollout of its own"
    assert asked[0] == asked[1] and len(asked[0]) == 60


def test_evaluation_waits_and_asks_the_present_weights(server: FakeVLLM, tmp_path: Path) -> None:
    settings = {"eval_dataset": make_dataset(4), "eval_strategy": "steps", "eval_steps": 1}
    server.faults.seconds = 0.05  # requests stay open for so long
    plain, evaluated = make(tmp_path / "a", server), make(tmp_path / "b", server, **settings)
    plain.train()
    evaluated.train()
    assert losses(plain) == losses(evaluated)
    assert [entry["rollout/staleness"] for entry in logs(evaluated)] == [0, 1, 1, 1, 1]
    figures = [entry for entry in evaluated.state.log_history if "eval_teacher_kl" in entry]
    assert len(figures) == 6 and not any("eval_rollout/staleness" in entry for entry in figures)


def test_a_second_run_begins_with_a_rollout_of_its_own(server: FakeVLLM, tmp_path: Path) -> None:
    class Stopping(Recording):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if len(self.steps) == 2:
                self.steps.clear()
                raise KeyboardInterrupt
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make(tmp_path, server, cls=Stopping, save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.progress.sampled_at == 0 and logs(trainer)[-1]["rollout/staleness"] == 0


# ---- Teachers and tools


def test_a_teacher_on_a_server_scores_in_the_same_thread(server: FakeVLLM, tmp_path: Path) -> None:
    threads: list[str] = []

    class Scoring(Recording):
        def score_with_teacher(self, rollout: Rollout) -> Tensor:
            threads.append(threading.current_thread().name)
            return super().score_with_teacher(rollout)

    with FakeVLLM(make_model(1)) as teacher:
        there = make(tmp_path / "a", server, cls=Scoring, teacher_model=teacher.url)
        there.train()
    assert threads == ["rollout"] * 5
    threads.clear()
    here = make(tmp_path / "b", server, cls=Scoring, teacher_model=make_model(1))
    here.train()
    assert threads == ["MainThread"] * 5
    assert losses(there) == pytest.approx(losses(here), abs=1e-4)


def test_with_tools(tmp_path: Path) -> None:
    with FakeVLLM(make_model(0, vocab_size=61), logprobs_mode="processed_logprobs", max_model_len=512) as server:
        trainer = tool_trainer(
            tmp_path,
            cls=OnPolicyDistillationTrainer,
            peft_config=lora(),
            rollout_engine="vllm",
            vllm_server_base_url=server.url,
            vllm_server_timeout=5.0,
            rollout_lag=1,
            max_prompt_length=32,
            max_completion_length=20,
            max_steps=3,
        )
        trainer.train()
    assert [entry["rollout/staleness"] for entry in logs(trainer)] == [0, 1, 0], "two steps go through the data"
    assert all("tools/call_frequency" in entry for entry in logs(trainer))


# ---- Faults


def test_a_lost_server_stops_the_run_with_a_checkpoint_that_resumes(server: FakeVLLM, tmp_path: Path) -> None:
    class Losing(Recording):
        rollouts_left = 3

        def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
            self.rollouts_left -= 1
            if self.rollouts_left == -1:
                self.server.stop()
            return super().generate_rollout(rows)

    trainer = make(tmp_path, server, cls=Losing, vllm_server_timeout=1.0)
    with pytest.raises(ServerError, match="state after step 3 is saved"):
        trainer.train()
    requests_ended()
    server.start()
    again = make(tmp_path, server)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [entry["rollout/staleness"] for entry in logs(again)] == [0, 1, 1, 0, 1], "the rollout on the way is written anew"
    strict = make(tmp_path / "strict", server, rollout_lag=0)
    strict.train()
    assert [prompts(batch) for _, batch in trainer.steps + again.steps] == [prompts(batch) for _, batch in strict.steps]


def test_a_rollout_that_was_half_used_resumes_with_its_staleness(server: FakeVLLM, tmp_path: Path) -> None:
    settings = {"num_substeps": 2, "save_strategy": "steps", "save_steps": 5, "max_steps": 8}
    make(tmp_path, server, **settings).train()
    again = make(tmp_path, server, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert [entry["rollout/staleness"] for entry in logs(again)] == [0, 1, 2, 3, 2, 3, 0, 1]


def test_an_error_of_the_other_thread_ends_the_run(server: FakeVLLM, tmp_path: Path) -> None:
    class Failing(Recording):
        rollouts_left = 2

        def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
            self.rollouts_left -= 1
            if self.rollouts_left == -1:
                raise LookupError("no such row")
            return super().generate_rollout(rows)

    with pytest.raises(LookupError, match="no such row"):
        make(tmp_path, server, cls=Failing).train()


def test_a_server_that_ignores_new_adapters_is_found_out(server: FakeVLLM, tmp_path: Path) -> None:
    """The rollout itself is of older weights than the trainer has, so that a probe has to tell."""
    server.faults.ignores_adapters = True
    trainer = make(tmp_path, server)
    with pytest.raises(ValueError, match=r"adapter '.*' was published, but .* differ by .* did not take effect"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_of_two_replicas_the_one_with_old_weights_is_found_out(server: FakeVLLM, tmp_path: Path) -> None:
    """However requests are shared: the slow replica has had fewer, and would be asked first."""
    server.faults.seconds = 0.05
    with FakeVLLM(make_model(0)) as other:
        other.faults.ignores_adapters = True
        urls = [server.url, other.url]
        trainer = make(tmp_path, server, vllm_server_base_url=urls, per_device_rollout_batch_size=2)
        with pytest.raises(ValueError, match="did not take effect"):
            trainer.train()
    assert trainer.state.global_step == 1


def test_log_probs_that_came_with_a_fresh_rollout_are_compared(server: FakeVLLM, tmp_path: Path) -> None:
    """As the first of each pass through the data is; a probe would not see what sampling does."""
    server.faults.stale_prefix_cache = True
    trainer = make(tmp_path, server, train_dataset=make_dataset(8), max_steps=6)
    with pytest.raises(ValueError, match="came with the rollout differ"):
        trainer.train()


def test_update_kl_is_of_the_rollouts_own_updates(server: FakeVLLM, tmp_path: Path) -> None:
    """Here only the first step has one."""

    class OneUpdate(Recording):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            for group in cast(Any, self.optimizer).param_groups if self.state.global_step else []:
                group["lr"] = 0.0
            return super().training_step(*args, **kwargs)

    trainer = make(tmp_path, server, cls=OneUpdate, compute_post_kl=True, max_steps=3)
    trainer.train()
    first, second, third = logs(trainer)
    assert first["update_kl/v2"] > 1e-4 and second["sampler_kl/v2"] > 1e-4
    assert max(second["update_kl/v2"], third["update_kl/v2"]) < 1e-10


def test_what_cannot_overlap_is_refused(server: FakeVLLM, tmp_path: Path) -> None:
    assert_error(
        lambda: make_config(tmp_path, rollout_lag=1), "'transformers' samples in the training process", "rollout_lag=0"
    )
    there = {"rollout_engine": "vllm", "vllm_server_base_url": server.url}
    assert_error(lambda: make_config(tmp_path, rollout_lag=2, **there), "rollout_lag is 2", "must be 0")
    assert_error(lambda: make_config(tmp_path, rollout_lag=1, top_p=0.9, **there), "top_p", "rollout_lag=0")
    assert_error(lambda: make(tmp_path, server, rollout_func=lambda prompts, trainer: {}), "rollout_func", "another thread")


# ---- What it comes to


@pytest.mark.slow
def test_one_step_late_learns_as_much(server: FakeVLLM, tmp_path: Path) -> None:
    """The ratio corrects for the older weights: the same KL in the end."""
    teacher = get_peft_model(make_model(0), lora())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    teacher = teacher.merge_and_unload()
    ends = []
    for lag in (0, 1):
        trainer = make(
            tmp_path / str(lag),
            server,
            teacher_model=teacher,
            rollout_lag=lag,
            max_steps=60,
            learning_rate=5e-3,
            per_device_train_batch_size=32,
            train_dataset=make_dataset(40),
            num_train_epochs=100,
        )
        trainer.train()
        kl = [entry["teacher_kl"] for entry in logs(trainer)]
        ends.append(sum(kl[-10:]) / 10)
        print(f"rollout_lag={lag}: teacher_kl {kl[0]:.3f} -> {ends[-1]:.3f}")
        assert ends[-1] < 0.6 * kl[0]
    assert ends[1] == pytest.approx(ends[0], rel=0.15)
