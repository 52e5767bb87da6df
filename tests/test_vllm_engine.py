"""Rollouts by vLLM servers, on the fake one: what is asked, what is published when, and what each fault leads to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import TrlParser

from trl_opd import Completion, OnPolicyDistillationConfig, OnPolicyDistillationTrainer
from trl_opd.rollout import VLLMEngine
from trl_opd.rollout.publisher import AdapterPublisher
from trl_opd.servers import BadAnswer, ServerError, Servers

from .fake_vllm import FakeVLLM, requests_ended
from .helpers import lora, losses, make_config, make_dataset, make_model, make_trainer, save_model, weights

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


class Recording(OnPolicyDistillationTrainer):
    """Notes for each rollout how far its log-probs are from the trainer's own of the same weights."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
        rollout = super().generate_rollout(rows)
        gap_BT = (self.student_logps(rollout) - rollout.sampled_logps_BT)[rollout.mask_BT].abs()
        self.rollouts = [*vars(self).get("rollouts", []), rollout]
        self.gaps: list[float] = [*vars(self).get("gaps", []), float(gap_BT.max())]
        return rollout


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(make_model(0), logprobs_mode="processed_logprobs") as fake:
        yield fake


def vllm_trainer(folder: Path, *servers: FakeVLLM, **more: Any) -> Any:
    settings = {
        "cls": Recording,
        "peft_config": lora(),
        "rollout_engine": "vllm",
        "vllm_server_base_url": [server.url for server in servers],
        "vllm_server_timeout": 5.0,
        "max_prompt_length": 32,
    }
    return make_trainer(folder, **{**settings, **more})


def rollout_requests(server: FakeVLLM) -> list[dict[str, Any]]:
    """Requests for completions of an adapter."""
    return [payload for path, payload in server.requests if path == COMPLETIONS and payload["model"] != "base"]


# ---- What is asked


def test_every_field_that_shapes_the_sample_is_sent(server: FakeVLLM, tmp_path: Path) -> None:
    """What a request leaves out, vLLM takes from the checkpoint's generation_config."""
    trainer = vllm_trainer(tmp_path, server, max_steps=1, temperature=0.9)
    trainer.engine.sync(trainer.student())
    (completion,) = trainer.engine.generate(trainer.student(), [[5, 6, 7]], [2**63 - 1])
    (request,) = rollout_requests(server)
    assert request == {
        "model": trainer.engine.publisher.version,
        "prompt": [5, 6, 7],
        "seed": 2**63 - 1,
        "max_tokens": 6,
        "min_tokens": 0,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stop_token_ids": [1],
        "logit_bias": {},
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert len(completion.ids) == len(completion.logps)
    assert completion.stopped == (completion.ids[-1] == 1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_the_trainers_before_and_after_updates(server: FakeVLLM, tmp_path: Path, temperature: float) -> None:
    trainer = vllm_trainer(tmp_path, server, max_steps=5, temperature=temperature)
    before = weights(trainer.student())
    trainer.train()
    assert len(trainer.gaps) == 5
    assert max(trainer.gaps) < 1e-5
    moved = [name for name, parameter in trainer.student().named_parameters() if not parameter.equal(before[name])]
    assert any("lora_B" in name for name in moved)


def test_the_same_run_gives_the_same_completions(server: FakeVLLM, tmp_path: Path) -> None:
    runs = [vllm_trainer(tmp_path / name, server) for name in ("one", "two")]
    for run in runs:
        run.train()
    assert losses(runs[0]) == losses(runs[1])
    seeds = [request["seed"] for request in rollout_requests(server)]
    assert len(set(seeds[: len(seeds) // 2])) == 8
    assert sorted(seeds[: len(seeds) // 2]) == sorted(seeds[len(seeds) // 2 :])


def test_padding_rows_of_the_vocabulary_are_never_sampled(tmp_path: Path) -> None:
    model = make_model(0, vocab_size=48)
    with torch.no_grad():
        model.lm_head.weight[43:] *= 4  # type: ignore[index]
    with FakeVLLM(model) as server:
        trainer = vllm_trainer(tmp_path, server, model=model, per_device_train_batch_size=16, max_steps=1)
        trainer.train()
        assert rollout_requests(server)[0]["logit_bias"] == {str(i): -100.0 for i in range(43, 48)}
    assert int(trainer.rollouts[0].ids_BT.max()) < 43
    assert max(trainer.gaps) < 1e-5


def test_truncated_sampling_is_scored_by_the_whole_softmax(tmp_path: Path) -> None:
    """The server's own log-probs, here those at temperature 1, are not taken."""
    with FakeVLLM(make_model(0)) as server:
        with pytest.warns(UserWarning, match="truncated distribution"):
            trainer = vllm_trainer(tmp_path, server, top_p=0.9, top_k=2, min_p=0.1, repetition_penalty=1.1, temperature=0.7)
        trainer.train()
        sent = rollout_requests(server)[0]
    assert [sent[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")] == [0.9, 2, 0.1, 1.1]
    assert min(trainer.gaps) > 0.1  # what the server says
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["sampler_kl/v2"] for entry in logs) < 1e-9  # what is trained on


def test_log_probs_are_looked_up_by_id(server: FakeVLLM, tmp_path: Path) -> None:
    server.faults.top_first = True
    trainer = vllm_trainer(tmp_path, server)
    trainer.train()
    assert max(trainer.gaps) < 1e-5


GOOD = {
    "token_ids": [5, 6, 1],
    "prompt_token_ids": [9],
    "finish_reason": "stop",
    "logprobs": {"top_logprobs": [{"token_id:5": -0.5}, {"token_id:7": -0.1, "token_id:6": -1.0}, {"token_id:1": -1.5}]},
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": [5, 6]}, "2 tokens with 3 log-probs"),
        ({"token_ids": [], "logprobs": {"top_logprobs": []}}, "0 tokens"),
        ({"token_ids": [5, 43, 1]}, "id 43, but the student's tokenizer has only 43"),
        ({"token_ids": [5, 6, 5], "finish_reason": "length"}, r"3 tokens \(finish_reason length\) neither end"),
        ({"token_ids": [5, 1, 1]}, "neither end with their first stop token"),
        ({"prompt_token_ids": [9, 9]}, "another prompt"),
        (
            {"logprobs": {"top_logprobs": [{"token_id:5": float("nan")}, {"token_id:6": -1.0}, {"token_id:1": -1.5}]}},
            "not finite",
        ),
    ],
)
def test_answers_that_are_no_completions_as_asked_for(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    servers = Servers(["http://127.0.0.1:1"], timeout=1.0)
    publisher = AdapterPublisher(servers, tmp_path)
    numbers = {"stop_ids": [1], "vocab_size": 43, "num_rows": 43, "probe_ids": [5, 6]}
    engine = VLLMEngine(make_config(tmp_path), servers, publisher, base="base", **numbers)
    assert engine._completion([9], 8, {"choices": [GOOD]}) == Completion([5, 6, 1], [-0.5, -1.0, -1.5], stopped=True)
    with pytest.raises(BadAnswer, match=told):
        engine._completion([9], 8, {"choices": [{**GOOD, **changes}]})


# ---- What is published


def test_each_version_is_published_once_under_its_own_name_and_dropped_after_the_next(
    server: FakeVLLM, tmp_path: Path
) -> None:
    trainer = vllm_trainer(tmp_path, server, max_steps=3)
    trainer.train()
    events = [(path, payload) for path, payload in server.requests if path in (LOAD, UNLOAD) or payload.get("model") != "base"]
    names = [payload["lora_name"] for path, payload in events if path == LOAD]
    run = trainer.engine.publisher.run
    assert names == [f"{run}-1", f"{run}-2", f"{run}-3"]
    story = [(path, payload.get("lora_name") or payload.get("model")) for path, payload in events if path != "/v1/models"]
    asked = [[(COMPLETIONS, name)] * 4 for name in names]
    assert story == [
        (LOAD, names[0]),
        *asked[0],
        (LOAD, names[1]),
        (UNLOAD, names[0]),
        *asked[1],
        (LOAD, names[2]),
        (UNLOAD, names[1]),
        *asked[2],
    ]
    folder = tmp_path / "_vllm_adapters" / run
    assert [path.name for path in folder.iterdir()] == [names[2]]
    assert {path.name for path in (folder / names[2]).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    trainer.engine = None
    assert not folder.exists()


def test_nothing_is_published_while_the_weights_stay(server: FakeVLLM, tmp_path: Path) -> None:
    trainer = vllm_trainer(tmp_path, server, eval_dataset=make_dataset(8), eval_strategy="no")
    trainer.evaluate()
    trainer.evaluate()
    assert [path for path, _ in server.requests].count(LOAD) == 1
    with torch.no_grad():
        next(p for name, p in trainer.student().named_parameters() if "lora_B" in name).add_(0.1)
    trainer.evaluate()
    assert [path for path, _ in server.requests].count(LOAD) == 2
    assert max(trainer.gaps) < 1e-5


def test_a_resumed_run_publishes_before_its_first_rollout(server: FakeVLLM, tmp_path: Path) -> None:
    whole = vllm_trainer(tmp_path / "whole", server, max_steps=4)
    whole.train()
    vllm_trainer(tmp_path / "cut", server, max_steps=2, save_strategy="steps", save_steps=2).train()
    resumed = vllm_trainer(tmp_path / "cut", server, max_steps=4)
    asked = len(server.requests)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-2"))
    paths = [path for path, payload in server.requests[asked:] if payload.get("model") != "base"]
    assert paths[0] == LOAD
    assert max(resumed.gaps) < 1e-5
    assert losses(resumed) == losses(whole)


# ---- Servers that fail


@pytest.mark.parametrize("fault", [{"errors": [500, 503]}, {"half": 2}, {"wrong_ids": 1}, {"no_logprobs": 1}, {"broken": 1}])
def test_a_bad_answer_is_asked_for_again(server: FakeVLLM, tmp_path: Path, fault: dict[str, Any]) -> None:
    good = vllm_trainer(tmp_path / "good", server, max_steps=1)
    good.train()
    trainer = vllm_trainer(tmp_path / "bad", server, max_steps=1)
    trainer.engine.sync(trainer.student())
    for name, value in fault.items():
        setattr(server.faults, name, value)
    trainer.train()
    assert losses(trainer) == losses(good)


def test_a_server_that_is_started_anew_gets_the_adapter_again(server: FakeVLLM, tmp_path: Path) -> None:
    class Restarting(Recording):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
            if self.state.global_step == 2:  # the adapter has been published already
                server.stop()
                server.start()
            return super().generate_rollout(rows)

    trainer = vllm_trainer(tmp_path, server, cls=Restarting, max_steps=4)
    trainer.train()
    assert max(trainer.gaps) < 1e-5
    names = [payload["lora_name"] for path, payload in server.requests if path == LOAD]
    assert [name[-1] for name in names] == ["1", "2", "3", "3", "4"]


def test_a_replica_that_missed_a_version_is_not_asked_before_it_has_it(server: FakeVLLM, tmp_path: Path) -> None:
    class OneDown(Recording):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
            rollout = super().generate_rollout(rows)
            if self.state.global_step == 1:
                other.stop()
            if self.state.global_step == 3:
                other.start()
            return rollout

    with FakeVLLM(make_model(0)) as other:
        trainer = vllm_trainer(tmp_path, server, other, cls=OneDown, max_steps=9, per_device_train_batch_size=8)
        trainer.train()
        assert other.counts[200] > 8  # rollouts of steps 1 and 2, and of some after it was back
    assert max(trainer.gaps) < 1e-5


@pytest.mark.parametrize("when", ["sync", "rollout"])
def test_a_server_that_is_lost_ends_the_run_with_a_checkpoint(server: FakeVLLM, tmp_path: Path, when: str) -> None:
    class Killing(Recording):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Any:
            rollout = super().generate_rollout(rows) if when == "sync" or self.state.global_step < 2 else None
            if self.state.global_step == (1 if when == "sync" else 2):
                server.stop()
            return rollout or super().generate_rollout(rows)

    whole = vllm_trainer(tmp_path / "whole", server, max_steps=4)
    whole.train()
    trainer = vllm_trainer(tmp_path / "cut", server, cls=Killing, max_steps=4, vllm_server_timeout=1.0)
    with pytest.raises(ServerError, match=rf"{server.url}.*checkpoint-2"):
        trainer.train()
    requests_ended()
    server.start()
    resumed = vllm_trainer(tmp_path / "cut", server, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-2"))
    assert losses(resumed) == losses(whole)


# ---- Servers that are wrong


def test_a_server_that_ignores_new_adapters_is_found_out_at_once(server: FakeVLLM, tmp_path: Path) -> None:
    server.faults.ignores_adapters = True
    trainer = vllm_trainer(tmp_path, server, max_steps=4)
    with pytest.raises(ValueError, match=r"After step 1 .* differ by .* sampled from other weights"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_prefix_cache_of_older_weights_is_found_out(server: FakeVLLM, tmp_path: Path) -> None:
    server.faults.stale_prefix_cache = True
    data = make_dataset(1)
    trainer = vllm_trainer(tmp_path, server, train_dataset=data, num_generations=4, max_steps=4)
    with pytest.raises(ValueError, match="sampled from other weights"):
        trainer.train()


def test_a_server_with_another_base_is_refused_before_training(server: FakeVLLM, tmp_path: Path) -> None:
    trainer = vllm_trainer(tmp_path, server, model=make_model(3))
    with pytest.raises(ValueError, match=r"'base' on http.* is not the student's base: .* differ by \d\.\d\d nats"):
        trainer.train()
    assert rollout_requests(server) == []


def test_log_probs_that_do_not_follow_the_temperature_are_refused(tmp_path: Path) -> None:
    with FakeVLLM(make_model(0)) as server:  # vLLM's default, raw_logprobs
        vllm_trainer(tmp_path / "one", server, max_steps=1).train()
        with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
            vllm_trainer(tmp_path / "other", server, temperature=0.7).train()


def test_a_context_that_is_too_short_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with FakeVLLM(make_model(0), max_model_len=37) as server:
        with pytest.raises(ValueError, match=r"may have 38 tokens .* with a context of 37"):
            vllm_trainer(tmp_path, server)
        vllm_trainer(tmp_path, server, max_prompt_length=31)


def test_a_server_without_adapters_says_how_to_start_it(server: FakeVLLM, tmp_path: Path) -> None:
    server.faults.errors, server.faults.errors_of = [404], LOAD
    with pytest.raises(
        ServerError, match=r"--enable-lora .* VLLM_ALLOW_RUNTIME_LORA_UPDATING.*_vllm_adapters.*vllm_adapter_dir"
    ):
        vllm_trainer(tmp_path, server).train()


def test_a_base_that_is_not_served_is_named_with_those_that_are(server: FakeVLLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serves no base model 'other'; it serves \['base'\]"):
        vllm_trainer(tmp_path, server, vllm_server_base_url=f"{server.url}#other")


# ---- Students and settings that do not fit


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_config": None}, "none: all its weights are trained"),
        ({"peft_config": lora(use_dora=True)}, "DoRA"),
        ({"peft_config": lora(modules_to_save=["lm_head"])}, "modules_to_save"),
        ({"peft_config": lora(trainable_token_indices=[3])}, "trainable_token_indices"),
        ({"peft_config": lora(bias="all")}, "bias all"),
        ({"peft_config": lora(init_lora_weights="pissa")}, "pissa"),
        ({"peft_config": lora(lora_bias=True)}, "lora_bias"),
        ({"peft_config": LoHaConfig(r=2, target_modules=["q_proj"])}, "not LoRA"),
    ],
)
def test_students_that_vllm_cannot_be_kept_up_with_are_refused(
    server: FakeVLLM, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"rollout_engine='vllm'.*({reason})"):
        vllm_trainer(tmp_path, server, **settings)


@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}, {"target_modules": ["lm_head"]}])
def test_other_kinds_of_lora_are_served(server: FakeVLLM, tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = vllm_trainer(tmp_path, server, peft_config=lora(**settings), max_steps=3)
    trainer.train()
    assert max(trainer.gaps) < 1e-5


def test_an_adapter_of_another_name_is_published(server: FakeVLLM, tmp_path: Path) -> None:
    student = get_peft_model(make_model(0), lora(), adapter_name="mine")
    trainer = vllm_trainer(tmp_path, server, model=student, peft_config=None)
    trainer.train()
    assert max(trainer.gaps) < 1e-5


def test_a_teachers_adapter_on_the_same_base_is_not_published(server: FakeVLLM, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", make_model(0))
    teacher: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(init_lora_weights=False))
    teacher.save_pretrained(tmp_path / "teacher")
    trainer = vllm_trainer(tmp_path, server, model=base, teacher_model=str(tmp_path / "teacher"))
    assert len(trainer.student().peft_config) == 2
    trainer.train()
    assert max(trainer.gaps) < 1e-5
    (saved,) = (tmp_path / "_vllm_adapters").rglob("*.safetensors")
    assert load_file(saved).keys() == load_file(tmp_path / "teacher/adapter_model.safetensors").keys()


def test_settings(tmp_path: Path) -> None:
    assert make_config(tmp_path, rollout_engine="vllm", vllm_server_base_url="http://a:1").vllm_server_base_url == [
        "http://a:1"
    ]
    for settings in ({"rollout_engine": "vllm"}, {"vllm_server_base_url": ["http://a:1"]}):
        with pytest.raises(ValueError, match="Set both or neither"):
            make_config(tmp_path, **settings)
    with pytest.raises(ValueError, match="rollout_engine is 'sglang'"):
        make_config(tmp_path, rollout_engine="sglang")
    arguments = [
        "--output_dir",
        str(tmp_path),
        "--rollout_engine",
        "vllm",
        "--vllm_server_base_url",
        "http://a:1",
        "http://b:2",
    ]
    (config,) = TrlParser(OnPolicyDistillationConfig).parse_args_and_config(arguments)  # type: ignore[arg-type]
    assert config.vllm_server_base_url == ["http://a:1", "http://b:2"]
