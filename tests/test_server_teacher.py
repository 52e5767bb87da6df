"""A teacher on a server: the scores of a teacher in process, or an error that says why not; a run outlives its server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trl_opd import DistillationWarning
from trl_opd.batch import Completion, Rollout
from trl_opd.rows import Filler
from trl_opd.servers import BadAnswer, RequestRefused, ServerError, Servers
from trl_opd.teachers import ModelTeacher, ServerTeacher
from trl_opd.teachers.probe import server_teacher
from trl_opd.teachers.server import prompt_logps

from .fake_vllm import FakeVLLM
from .helpers import lora, losses, make_config, make_dataset, make_model, make_tokenizer, make_trainer, weights
from .processes import Processes
from .test_checkpoints import DATASETS, assert_same_run, resumed, trainer
from .test_teachers import perturbed

PATH = "/v1/completions"


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(make_model(1)) as fake:
        yield fake


def make_rollout(teacher_prompts: bool = False, rows: list[Any] | None = None) -> Rollout:
    """Four completions of different lengths, of which the first two are equal."""
    prompts = [[5, 14, 6], [5, 14, 6], [7, 8, 14, 9, 15], [3]]
    completions = [[20, 21, 22, 1], [20, 21, 22, 1], [30, 31], [9]]
    return Rollout.build(
        prompts,
        [Completion(ids, [-1.0] * len(ids), stopped=ids[-1] == 1) for ids in completions],
        rows or [{}] * 4,
        pad_id=0,
        device=torch.device("cpu"),
        teacher_prompts=[[33, 34], [35, 36, 37, 38], [39], [40, 41, 42, 4, 5, 6]] if teacher_prompts else None,
    )


def teacher_on(server: FakeVLLM, timeout: float = 5.0, **settings: Any) -> ServerTeacher:
    """Not probed."""
    return ServerTeacher(Servers([server.url], timeout=timeout), "base", **{"temperature": 1.0, **settings})


def in_process(rollout: Rollout, model: Any = None) -> torch.Tensor:
    return ModelTeacher(model or make_model(1), temperature=1.0, vocab_size=43, batch_size=2).score(rollout)


def assert_scores(teacher: ServerTeacher, rollout: Rollout, model: Any = None) -> None:
    """On action tokens, those of a teacher in process."""
    found_BT, expected_BT = teacher.score(rollout), in_process(rollout, model)
    assert found_BT.dtype == torch.float32 and found_BT.shape == rollout.ids_BT.shape
    mask_BT = rollout.mask_BT
    torch.testing.assert_close(found_BT[mask_BT], expected_BT[mask_BT], atol=1e-5, rtol=0)


def assert_served_as_in_process(url: str, model: Any, rollout: Rollout, tokenizer: Any, folder: Path, atol: float) -> None:
    """For tests with a real server too: what serves `model` at `url` passes the probe and scores as `model` does."""
    args = make_config(folder, max_prompt_length=32, max_completion_length=32)
    teacher = server_teacher([url], model, tokenizer, args)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    expected_BT = ModelTeacher(model, temperature=1.0, vocab_size=vocab_size, batch_size=8).score(rollout)
    found_BT = teacher.score(rollout)
    torch.testing.assert_close(found_BT[rollout.mask_BT], expected_BT[rollout.mask_BT], atol=atol, rtol=0)


# ---- Scores


@pytest.mark.parametrize("teacher_prompts", [False, True])
@pytest.mark.parametrize("top_first", [False, True])
def test_scores_are_those_of_a_teacher_in_process(server: FakeVLLM, teacher_prompts: bool, top_first: bool) -> None:
    server.faults.top_first = top_first
    assert_scores(teacher_on(server), make_rollout(teacher_prompts))


def test_a_probed_teacher_scores_so_too(server: FakeVLLM, tmp_path: Path) -> None:
    assert_served_as_in_process(server.url, make_model(1), make_rollout(), make_tokenizer(), tmp_path, 1e-5)


def test_equal_rows_are_asked_for_once_and_rows_without_an_action_not_at_all(server: FakeVLLM) -> None:
    rollout = make_rollout(rows=[{}, {}, Filler(), {}])
    mask_BT = rollout.mask_BT.clone()
    mask_BT[3] = False
    rollout = replace(rollout, mask_BT=mask_BT)
    scores_BT = teacher_on(server).score(rollout)
    assert [payload["prompt"] for _, payload in server.requests] == [[5, 14, 6, 20, 21, 22, 1]]
    torch.testing.assert_close(scores_BT[:2], torch.where(mask_BT, in_process(rollout), 0.0)[:2], atol=1e-5, rtol=0)
    assert not scores_BT[2:].any()
    server.requests.clear()
    assert not teacher_on(server).score(replace(rollout, mask_BT=torch.zeros_like(mask_BT))).any() and not server.requests


def test_equal_rows_after_different_prompts_of_the_teacher_are_not_mixed_up(server: FakeVLLM) -> None:
    assert_scores(teacher_on(server), make_rollout(teacher_prompts=True))
    assert len(server.requests) == 4


def test_one_text_cut_at_two_places_is_two_rows(server: FakeVLLM) -> None:
    prompts, completions = [[5, 6], [5, 6, 7]], [[7, 8, 1], [8, 1]]
    rollout = Rollout.build(
        prompts,
        [Completion(ids, [-1.0] * len(ids), True) for ids in completions],
        [{}, {}],
        pad_id=0,
        device=torch.device("cpu"),
    )
    assert_scores(teacher_on(server), rollout)


def test_an_adapter_is_a_teacher_too(server: FakeVLLM, tmp_path: Path) -> None:
    adapted: Any = perturbed(get_peft_model(make_model(1), lora()), seed=3)  # type: ignore[arg-type]
    adapted.save_pretrained(str(tmp_path))
    Servers([server.url], timeout=5).tell_each("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(tmp_path)})
    adapted.eval()
    url = f"{server.url}#mine"
    assert_served_as_in_process(url, adapted, make_rollout(), make_tokenizer(), tmp_path, 1e-5)


def answer(*positions: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None, *positions]}]}


def test_a_token_that_is_ruled_out_is_minus_infinity() -> None:
    """-9999 is how vLLM writes it; `check_scores` knows what to do with it."""
    found = prompt_logps(answer({"6": {"logprob": -9999.0}}, {"7": {"logprob": 1e-7}}), [5, 6, 7], 1)
    assert found == [-math.inf, 0.0]


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([{"6": {"logprob": -1.0}}], "2 positions for 3 ids"),
        ([{"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}], "id 8 at position 2, where id 7 is"),
        ([{"8": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}], "id 8 at position 1, where id 6 is"),
        ([{"6": {"logprob": -1.0}}, None], r"id \(none\) at position 2"),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": math.nan}}], "nan"),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": 3.0}}], "3.0"),
    ],
)
def test_answers_that_are_about_something_else(positions: list[Any], words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        prompt_logps(answer(*positions), [5, 6, 7], 2)


# ---- Faults


@pytest.mark.parametrize("fault", ["half", "wrong_ids", "no_logprobs", "nan", "broken", "errors"])
def test_a_fault_that_passes_changes_no_score(server: FakeVLLM, fault: str) -> None:
    setattr(server.faults, fault, [500, 503] if fault == "errors" else 2)
    assert_scores(teacher_on(server), make_rollout())
    assert sum(path == PATH for path, _ in server.requests) == 5


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("half", "3 positions for 7 ids"),
        ("wrong_ids", "id 15 at position 1, where id 14 is"),
        ("no_logprobs", "without prompt_logprobs"),
        ("nan", "with nan for a log-prob"),
    ],
)
def test_a_fault_that_stays_is_told_with_server_row_and_reason(server: FakeVLLM, fault: str, words: str) -> None:
    setattr(server.faults, fault, 1000)
    rollout = make_rollout()
    with pytest.raises(ServerError, match=words) as caught:
        teacher_on(server, timeout=0.2).score(rollout[torch.tensor([True, False, False, False])])
    assert server.url in str(caught.value) and "row 0" in str(caught.value) and "status 200" in str(caught.value)


def test_a_row_that_is_too_long_is_told_at_once(server: FakeVLLM) -> None:
    server.max_model_len = 7
    with pytest.raises(RequestRefused, match=r"row [02].*maximum context length is 7"):
        teacher_on(server).score(make_rollout())


# ---- Before training


def probe(*servers: FakeVLLM, fragment: str = "", **settings: Any) -> ServerTeacher:
    """What a trainer with these settings makes of the servers."""
    args = make_config(Path("unused"), **{"max_prompt_length": 20, "vllm_server_timeout": 5.0, **settings})
    return server_teacher([f"{one.url}{fragment}" for one in servers], make_model(0), make_tokenizer(), args)


def test_a_good_server_passes_without_a_word(server: FakeVLLM) -> None:
    teacher = probe(server)
    assert (teacher.model, teacher.temperature, teacher.name) == ("base", 1.0, f"{server.url}#base")
    assert probe(server, fragment="#base").model == "base"


def test_unreachable(server: FakeVLLM) -> None:
    server.stop()
    with pytest.raises(ServerError, match=f"{server.url}: ConnectError.*vllm_server_timeout"):
        probe(server, vllm_server_timeout=0.3)


def test_no_such_model(server: FakeVLLM) -> None:
    with pytest.raises(ValueError, match=r"does not serve 'math'; it serves \['base'\]"):
        probe(server, fragment="#math")


def test_replicas_that_serve_different_models(server: FakeVLLM) -> None:
    with FakeVLLM(make_model(1), name="math") as other:
        with pytest.raises(ValueError, match="'base', 'math'"):
            probe(server, other)
        with pytest.raises(ValueError, match=f"{other.url} does not serve 'base'"):
            probe(server, other, fragment="#base")


def test_replicas_with_different_weights(server: FakeVLLM) -> None:
    with FakeVLLM(make_model(2)) as other, pytest.raises(ValueError, match=f"{server.url} and {other.url} differ by"):
        probe(server, other)
    with FakeVLLM(make_model(1)) as other:
        assert len(probe(server, other).servers.urls) == 2


def test_context_too_short(server: FakeVLLM) -> None:
    server.max_model_len = 27  # prompts 20, completions 6, and one
    probe(server)
    server.max_model_len = 26
    with pytest.raises(ValueError, match=r"at most 26 tokens.*max_prompt_length to at most 19"):
        probe(server)
    server.max_model_len = 128  # as the student's own: a prompt that fills it to the last token is not expected
    probe(server, max_prompt_length=None)
    server.max_model_len = 127
    with pytest.raises(ValueError, match=r"max_prompt_length to at most 120"):
        probe(server, max_prompt_length=None)


def test_another_tokenizer(server: FakeVLLM) -> None:
    vocab = make_tokenizer().get_vocab()
    vocab["7"], vocab["q"] = vocab["q"], vocab["7"]
    server.tokenizer = make_tokenizer(vocab=vocab)
    with pytest.raises(ValueError, match="tokenizer") as caught:
        probe(server)
    assert "'7' is id 11 to the student, 33 on the server" in str(caught.value)
    assert "'q' is id 33 to the student, 11 on the server" in str(caught.value)


def test_another_stop_token(server: FakeVLLM) -> None:
    vocab = {("<end>" if token == "<eos>" else token): i for token, i in make_tokenizer().get_vocab().items()}
    server.tokenizer = make_tokenizer(vocab=vocab)
    with pytest.raises(ValueError, match="'<eos>' is id 1 to the student"):
        probe(server)


def test_no_way_to_compare_tokenizers_is_told(server: FakeVLLM) -> None:
    server.faults.no_tokenize = True
    with pytest.warns(DistillationWarning, match="not checked that its ids mean the same tokens"):
        probe(server)


@pytest.mark.parametrize("fault", ["half", "wrong_ids", "no_logprobs", "nan"])
def test_a_server_that_does_not_return_log_probs_of_the_ids(server: FakeVLLM, fault: str) -> None:
    setattr(server.faults, fault, 1000)
    with pytest.raises(ValueError, match="cannot be a teacher"):
        probe(server)


def test_a_server_that_returns_logits(server: FakeVLLM) -> None:
    server.faults.adds = 9.0
    with pytest.raises(ValueError, match="for a log-prob"):
        probe(server)


class TwoCertainties(FakeVLLM):
    """Gives nine tenths to the token that is asked about, and to another."""

    def _entry(self, logps_V: torch.Tensor, token: int, num_top: int) -> dict[str, Any]:
        return {str(i): {"logprob": math.log(0.9), "rank": 1, "decoded_token": ""} for i in (token, (token + 1) % 43)}


def test_a_server_whose_probabilities_are_too_many() -> None:
    with TwoCertainties(make_model(1)) as server, pytest.raises(ValueError, match=r"add up to 1\.80"):
        probe(server)


@pytest.mark.parametrize("fault", ["dies_of", "mixes_up"])
def test_a_server_that_cannot_score_several_at_once(server: FakeVLLM, fault: str) -> None:
    """As vLLM 0.32 with --enable-lora, if the language head is adapted too: it crashes, or scores with another adapter."""
    server.faults.seconds = 0.1
    setattr(server.faults, fault, 4)
    with pytest.raises(ServerError if fault == "dies_of" else ValueError, match=r"at once.*--lora-target-modules"):
        probe(server, vllm_server_timeout=1.0)


def test_temperature(server: FakeVLLM) -> None:
    """Refused unless the server honours it for prompts, which vLLM does not."""
    with pytest.raises(ValueError, match="does not score at it"):
        probe(server, temperature=0.7)
    server.faults.prompt_temperature = True
    assert probe(server, temperature=0.7).temperature == 0.7
    rollout = make_rollout()
    expected_BT = ModelTeacher(make_model(1), temperature=0.7, vocab_size=43, batch_size=2).score(rollout)
    found_BT = teacher_on(server, temperature=0.7).score(rollout)
    torch.testing.assert_close(found_BT[rollout.mask_BT], expected_BT[rollout.mask_BT], atol=1e-5, rtol=0)


def test_arguments_for_loading_are_refused(server: FakeVLLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on a server, which loads it itself"):
        make_trainer(tmp_path, teacher_model=server.url, teacher_model_init_kwargs={"dtype": "float32"})


@pytest.mark.parametrize("teacher", [[], ["Qwen/Qwen3-4B"], ["http://127.0.0.1:1", "Qwen/Qwen3-4B"]])
def test_a_list_means_replicas(tmp_path: Path, teacher: list[str]) -> None:
    with pytest.raises(ValueError, match="a list means replicas"):
        make_trainer(tmp_path, teacher_model=teacher)


# ---- Training


def test_training_is_that_with_the_teacher_in_process(server: FakeVLLM, tmp_path: Path) -> None:
    runs = [
        make_trainer(tmp_path / "here", max_steps=3),
        make_trainer(tmp_path / "url", max_steps=3, teacher_model=server.url),
    ]
    for run in runs:
        run.train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-4)
    for name, tensor in weights(runs[0].model).items():
        torch.testing.assert_close(tensor, weights(runs[1].model)[name], atol=1e-3, rtol=0)


def test_the_teacher_may_stand_in_the_settings(server: FakeVLLM, tmp_path: Path) -> None:
    run = make_trainer(tmp_path, teacher_model=None, teacher_model_name_or_path=f"{server.url}/v1#base")
    assert isinstance(run.teacher, ServerTeacher)


def test_the_card_names_the_served_model_and_not_the_host(tmp_path: Path) -> None:
    for name, shown in {"org/teacher": "[org/teacher](https://huggingface.co/org/teacher)", "base": "`base`"}.items():
        with FakeVLLM(make_model(1), name=name) as server:
            make_trainer(tmp_path, teacher_model=server.url).create_model_card()
        text = (tmp_path / "README.md").read_text()
        assert f"distilled on-policy from {shown} (on a vLLM server)" in text and "127.0.0.1" not in text


def test_the_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "open-sesame")
    with FakeVLLM(make_model(1), api_key="open-sesame") as server:
        run = make_trainer(tmp_path, teacher_model=server.url, save_strategy="steps", save_steps=1, log_completions=True)
        run.train()
        run.save_model()
        run.create_model_card()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not any(b"open-sesame" in path.read_bytes() for path in files)


class AfterStep(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step: int, function: Callable[[], Any]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


def test_one_of_two_replicas_dies_in_training(server: FakeVLLM, tmp_path: Path) -> None:
    undisturbed = make_trainer(tmp_path / "a", max_steps=4, teacher_model=server.url)
    undisturbed.train()
    with FakeVLLM(make_model(1)) as other:
        urls = [server.url, other.url]
        run = make_trainer(tmp_path / "b", max_steps=4, teacher_model=urls, callbacks=[AfterStep(2, other.stop)])
        run.train()
    assert losses(run) == pytest.approx(losses(undisturbed), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "step", "saved"),
    [
        pytest.param("8 prompts", 1, 2, id="half of a rollout used, which is trained on first"),
        pytest.param("8 prompts", 4, 4, id="a rollout and the epoch end", marks=pytest.mark.slow),
        pytest.param("5 prompts", 3, 3, id="short rollout at the end of the epoch", marks=pytest.mark.slow),
        pytest.param("stream", 2, 2, id="shuffled stream", marks=pytest.mark.slow),
        pytest.param("short stream", 4, 5, id="stream's second pass", marks=pytest.mark.slow),
    ],
)
def test_a_lost_server_stops_a_run_that_resumes_as_if_nothing_had_been(
    server: FakeVLLM, tmp_path: Path, name: str, step: int, saved: int
) -> None:
    more = {"teacher_model": server.url, "vllm_server_timeout": 1.0}
    whole = trainer(tmp_path / "whole", DATASETS[name](), **more)
    whole.train()
    stopped = trainer(tmp_path / "run", DATASETS[name](), **more, save_strategy="no", callbacks=[AfterStep(step, server.stop)])
    checkpoint = tmp_path / "run" / f"checkpoint-{saved}"
    with pytest.raises(ServerError, match=f"after step {saved} is saved in '{checkpoint}'.*resume_from_checkpoint"):
        stopped.train()
    assert stopped.state.global_step == saved
    server.start()
    assert_same_run(whole, resumed(tmp_path / "run", DATASETS[name](), True, **more))


def test_a_server_lost_in_an_evaluation_stops_the_run_likewise(server: FakeVLLM, tmp_path: Path) -> None:
    more = {"teacher_model": server.url, "vllm_server_timeout": 1.0}
    whole = trainer(tmp_path / "whole", DATASETS["8 prompts"](), **more)
    whole.train()
    evaluated = {"eval_dataset": make_dataset(4), "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": False}
    callback = AfterStep(3, server.stop)  # half of a rollout is in hand
    stopped = trainer(tmp_path / "run", DATASETS["8 prompts"](), **more, **evaluated, save_strategy="no", callbacks=[callback])
    with pytest.raises(ServerError, match="after step 3 is saved"):
        stopped.train()
    with pytest.raises(ServerError) as caught:
        stopped.evaluate()
    assert "is saved" not in str(caught.value)
    server.start()
    assert_same_run(whole, resumed(tmp_path / "run", DATASETS["8 prompts"](), True, **more))


def test_nothing_is_saved_before_the_first_step(server: FakeVLLM, tmp_path: Path) -> None:
    run = make_trainer(tmp_path, teacher_model=server.url, vllm_server_timeout=1.0)
    server.stop()
    with pytest.raises(ServerError, match="No step had been trained"):
        run.train()
    assert not list(tmp_path.glob("checkpoint-*"))


# ---- Two processes


def losses_or_error(folder: str, urls: list[str], stop_after: int | None, resume: bool) -> Any:
    """Each process has a server of its own; after a step the second process's is told to fail for good."""
    rank = torch.distributed.get_rank()
    callbacks = []
    if stop_after is not None and rank == 1:
        callbacks = [AfterStep(stop_after, lambda: Servers([urls[1]], timeout=5).tell_each("/stop", {}))]
    run = make_trainer(
        Path(folder),
        teacher_model=urls[rank],
        vllm_server_timeout=2.0,
        max_steps=4,
        peft_config=lora(),
        per_device_train_batch_size=2,
        callbacks=callbacks,
        eval_dataset=make_dataset(4),
        eval_strategy="steps",
        eval_steps=2,
    )
    try:
        run.train(resume_from_checkpoint=resume)
    except ServerError as error:
        return str(error)
    trained = {name: tensor for name, tensor in weights(run.model).items() if "lora" in name}
    shards = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in trained.items()}
    return losses(run), shards


@pytest.mark.dist
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("step", [1, 2], ids=["in a rollout", "in an evaluation"])
def test_a_server_lost_to_one_process_stops_all(two: Processes, tmp_path: Path, how: str, step: int) -> None:
    with FakeVLLM(make_model(1)) as one, FakeVLLM(make_model(1)) as other:
        urls = [one.url, other.url]
        whole = two.run(how, losses_or_error, str(tmp_path / "whole"), urls, None, False)
        first, second = two.run(how, losses_or_error, str(tmp_path / "run"), urls, step, False)
        assert first.startswith(f"On another process: No good answer to {PATH}") and other.url in first
        assert second.startswith("No good answer")
        assert all(f"after step {step} is saved" in message for message in (first, second))
        other.faults.errors.clear()
        results = two.run(how, losses_or_error, str(tmp_path / "run"), urls, None, True)
    for (found, shards), (expected, expected_shards) in zip(results, whole, strict=True):
        assert found == expected
        assert shards and all(torch.equal(shards[name], tensor) for name, tensor in expected_shards.items())
