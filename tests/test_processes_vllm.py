"""Two processes that roll out on one server: the first publishes, all wait for it, each asks for its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_opd import Rollout
from trl_opd.servers import ServerError

from .fake_vllm import FakeVLLM
from .helpers import lora, make_dataset, make_model, make_trainer
from .processes import Processes, launched
from .test_processes import WAYS, Recording

pytestmark = pytest.mark.dist
LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


class Losing(Recording):
    """Before the rollout of the third step, the second process makes the server forget the adapter."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        engine: Any = self.engine
        if self.state.global_step == 2 and self.accelerator.process_index == 1:
            engine.servers.tell_each(UNLOAD, {"lora_name": engine.publisher.version})
        return super().generate_rollout(rows)


def train(folder: str, url: str, cls: type[Recording] = Recording, **more: Any) -> Any:
    """What each rollout wrote, and the logs."""
    settings = {"peft_config": lora(), "train_dataset": make_dataset(40), "max_prompt_length": 32, "max_steps": 4}
    servers = {"rollout_engine": "vllm", "vllm_server_base_url": url, "vllm_server_timeout": 5.0}
    trainer = make_trainer(Path(folder), cls=cls, **{**settings, **servers, **more})
    trainer.train()
    return {"written": trainer.written, "logs": [entry for entry in trainer.state.log_history if "loss" in entry]}


def fails(folder: str, url: str) -> str:
    """The error that a server that takes no adapter ends the run with."""
    with pytest.raises(ServerError) as raised:
        train(folder, url)
    return str(raised.value)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(make_model(0)) as fake:
        yield fake


@WAYS
def test_two_processes_train_as_one(two: Processes, server: FakeVLLM, tmp_path: Path, how: str) -> None:
    one = launched("one", train, str(tmp_path / "one"), server.url, per_device_train_batch_size=8)
    server.requests.clear()
    results = two.run(how, train, str(tmp_path / "two"), server.url, per_device_train_batch_size=4)
    for step, whole in enumerate(one["written"]):
        assert [row for result in results for row in result["written"][step]] == whole
    for result in results:
        assert [entry["loss"] for entry in result["logs"]] == pytest.approx([entry["loss"] for entry in one["logs"]], rel=1e-4)
        assert max(entry["sampler_kl/v2"] for entry in result["logs"]) < 1e-9
    loaded = [payload["lora_name"] for path, payload in server.requests if path == LOAD]
    assert len(loaded) == len(set(loaded)) == 4
    current = ""
    for path, payload in server.requests:
        current = payload["lora_name"] if path == LOAD else current
        assert path != COMPLETIONS or payload["model"] in ("base", current)


@WAYS
def test_two_processes_train_as_one_with_rollouts_written_ahead(
    two: Processes, server: FakeVLLM, tmp_path: Path, how: str
) -> None:
    more = {"rollout_lag": 1, "eval_dataset": make_dataset(8), "eval_strategy": "steps", "eval_steps": 1}
    one = launched("one", train, str(tmp_path / "one"), server.url, per_device_train_batch_size=8, **more)
    results = two.run(how, train, str(tmp_path / "two"), server.url, per_device_train_batch_size=4, **more)
    for result in results:
        assert [entry["loss"] for entry in result["logs"]] == pytest.approx([entry["loss"] for entry in one["logs"]], rel=1e-4)
        assert [entry["rollout/staleness"] for entry in result["logs"]] == [0, 1, 1, 1]


def own_loop_loses(folder: str) -> str:
    """What each process is told where the user's loop of one has lost its server."""

    def loop(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step == 1 and trainer.accelerator.process_index == 0:
            raise ServerError("the loop's server is lost.")
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": [[7, 8]] * len(prompts)}

    trainer = make_trainer(Path(folder), peft_config=lora(), train_dataset=make_dataset(40), max_steps=3, rollout_func=loop)
    with pytest.raises(ServerError) as raised:
        trainer.train()
    return str(raised.value)


@WAYS
def test_a_server_that_a_users_loop_lost_ends_all_processes(two: Processes, tmp_path: Path, how: str) -> None:
    for told in two.run(how, own_loop_loses, str(tmp_path)):
        assert "the loop's server is lost. The state after step 1 is saved" in told


def trains_with_two_servers(folder: str, url: str, teachers: dict[str, str]) -> list[float]:
    data = {name: make_dataset(20) for name in teachers}
    more = {"train_dataset": data, "teacher_model": teachers, "rollout_lag": 1, "max_steps": 3}
    return [entry["loss"] for entry in train(folder, url, **more)["logs"]]


@WAYS
def test_several_teachers_on_servers_score_ahead(two: Processes, server: FakeVLLM, tmp_path: Path, how: str) -> None:
    with FakeVLLM(make_model(1)) as one, FakeVLLM(make_model(2)) as other:
        teachers = {"x": one.url, "y": other.url}
        losses = two.run(how, trains_with_two_servers, str(tmp_path), server.url, teachers)
    assert losses[0] == losses[1] and len(losses[0]) == 3


@WAYS
def test_a_process_that_did_not_publish_publishes_again(two: Processes, server: FakeVLLM, tmp_path: Path, how: str) -> None:
    results = two.run(how, train, str(tmp_path), server.url, Losing)
    assert all(len(result["logs"]) == 4 for result in results)
    assert all(entry["sampler_kl/v2"] < 1e-9 for result in results for entry in result["logs"])
    loaded = [payload["lora_name"][-1] for path, payload in server.requests if path == LOAD]
    assert set(loaded) == {"1", "2", "3", "4"}
    assert loaded.count("3") > 1


def test_an_error_of_the_first_process_ends_all(two: Processes, server: FakeVLLM, tmp_path: Path) -> None:
    server.faults.errors, server.faults.errors_of = [404], LOAD
    for message in two.run("ddp", fails, str(tmp_path), server.url):
        assert "--enable-lora" in message
