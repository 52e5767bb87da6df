"""What reaches the Hub, seen from the other end of the socket, and what is left if it does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_opd import DistillationWarning
from trl_opd.model_card import CardFacts, model_card

from .helpers import lora, make_dataset, make_model, make_tokenizer, make_trainer, save_model
from .hub_server import REPO_ID, HubServer

IDS = torch.tensor([[10, 15, 4, 7, 20, 33]])


# ---- The pushing process. HF_ENDPOINT is read when huggingface_hub is imported, so it is a process of its own.


def main(folder: Path) -> None:
    """Trains and pushes; writes what happened and the logits of each model to `folder`."""
    report: dict[str, Any] = {}
    base, teacher = save_model(folder / "base", make_model(0)), save_model(folder / "teacher", make_model(1))

    with reported(report, "distilled"):
        run = make_trainer(
            folder / "distilled",
            model=base,
            teacher_model=teacher,
            processing_class=None,
            peft_config=lora(),
            eval_dataset=make_dataset(2),
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            log_completions=True,
            report=True,
            push_to_hub=True,
            hub_model_id="tester/distilled",
        )
        run.train()
        keep_logits(run, folder)
        run.push_to_hub(dataset_name="someone/prompts", tags="arithmetic", license="apache-2.0")

    with reported(report, "in-memory"):  # and without args.push_to_hub, so without a name for the repository
        run = make_trainer(folder / "in-memory", peft_config=lora(), max_steps=1)
        run.train()
        keep_logits(run, folder)
        run.push_to_hub()

    with reported(report, "whole"):
        run = make_trainer(folder / "whole", max_steps=1)
        run.train()
        keep_logits(run, folder)
        run.push_to_hub()

    with reported(report, "broken"):
        run = make_trainer(folder / "broken", peft_config=lora(), max_steps=1)
        run.train()
        keep_logits(run, folder)
        run.push_to_hub()

    with reported(report, "broken-checkpoints"):
        settings = {"push_to_hub": True, "hub_model_id": "tester/broken-checkpoints", "hub_strategy": "every_save"}
        run = make_trainer(
            folder / "broken-checkpoints",
            peft_config=lora(),
            save_strategy="steps",
            save_steps=1,
            max_steps=3,
            callbacks=[waiter := WaitForPush()],
            **settings,
        )
        waiter.run = run
        run.train()
        keep_logits(run, folder)
        report["steps"] = run.state.global_step

    with reported(report, "refused"):
        run = make_trainer(folder / "refused", peft_config=lora(), max_steps=1)
        run.train()
        keep_logits(run, folder)
        stop_server(os.environ["HF_ENDPOINT"])
        run.push_to_hub()

    (folder / "report.json").write_text(json.dumps(report))


class WaitForPush(TrainerCallback):
    """Lets a checkpoint's push end before the next step, so that what is seen does not depend on the machine's speed."""

    run: Any

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.push_in_progress.wait_until_done()


def stop_server(url: str) -> None:
    """Returns when connections are refused."""
    urllib.request.urlopen(f"{url}/stop").read()
    host, port = url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        while True:
            with suppress(ConnectionResetError):  # while it closes
                socket.create_connection((host, int(port)), timeout=5).close()
            time.sleep(0.01)


@contextmanager
def reported(report: dict[str, Any], name: str) -> Iterator[None]:
    """Notes the error and our warnings."""
    entry: dict[str, Any] = {"error": None}
    report[name] = entry
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["cause"] = type(error.__cause__).__name__
    entry["warnings"] = [str(w.message) for w in caught if issubclass(w.category, DistillationWarning)]


def keep_logits(run: Any, folder: Path) -> None:
    with torch.no_grad():
        torch.save(run.model.eval()(IDS).logits, folder / f"{Path(run.args.output_dir).name}.pt")


# ---- The tests of what it did


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[HubServer, Path, dict[str, Any]]:
    """The Hub, the folder of the pushing process and its report."""
    folder = tmp_path_factory.mktemp("pushed")
    with HubServer() as hub:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        environment |= {
            "OMP_NUM_THREADS": "1",  # as here: logits are compared bit for bit
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "dummy",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "home"),
        }
        code = f"from pathlib import Path; from tests.test_hub import main; main(Path({str(folder)!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    return hub, folder, json.loads((folder / "report.json").read_text())


@pytest.fixture
def hub(pushed: tuple[HubServer, Path, dict[str, Any]]) -> HubServer:
    return pushed[0]


@pytest.fixture
def folder(pushed: tuple[HubServer, Path, dict[str, Any]]) -> Path:
    return pushed[1]


@pytest.fixture
def report(pushed: tuple[HubServer, Path, dict[str, Any]]) -> dict[str, Any]:
    return pushed[2]


def assert_adapter_gives(path: Path, expected: Path, base: Any) -> None:
    """The adapter at `path` on `base` gives the logits that the trainer's model gave."""
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, str(path)).eval()(IDS).logits
    assert torch.equal(logits, torch.load(expected))


def download(hub: HubServer, repo: str, folder: Path) -> Path:
    """Writes a repository's files."""
    for name, content in hub.repos[repo].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_the_client_asked_for_nothing_the_server_does_not_know(hub: HubServer) -> None:
    assert hub.unknown == []


@pytest.mark.slow
def test_the_adapter_the_tokenizer_and_the_card_arrive_and_nothing_else(hub: HubServer, report: dict[str, Any]) -> None:
    """No base weights, no completions, no checkpoints (of which there were some)."""
    assert report["distilled"]["error"] is None
    assert sorted(hub.repos["tester/distilled"]) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "curves.png",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.bin",
    ]
    assert sum(len(data) for name, data in hub.repos["tester/distilled"].items() if name != "curves.png") < 60_000
    assert hub.repos["tester/distilled"]["curves.png"].startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_was_to_stay_at_home_was_there_to_be_pushed(folder: Path) -> None:
    """Else the test above would show nothing."""
    names = {path.name for path in (folder / "distilled").iterdir()}
    assert {"_completions", "_report", "checkpoint-1", "checkpoint-2"} <= names
    assert list((folder / "distilled" / "_completions").iterdir())
    assert (folder / "distilled" / "_report" / "report.html").is_file()


@pytest.mark.slow
def test_what_arrived_can_be_loaded_as_the_card_says(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    copy = download(hub, "tester/distilled", tmp_path)
    assert_adapter_gives(copy, folder / "distilled.pt", AutoModelForCausalLM.from_pretrained(folder / "base"))
    assert AutoTokenizer.from_pretrained(copy).get_vocab() == make_tokenizer().get_vocab()
    with torch.no_grad():  # the base is still where the adapter's config says
        assert torch.equal(
            AutoPeftModelForCausalLM.from_pretrained(copy).eval()(IDS).logits, torch.load(folder / "distilled.pt")
        )


@pytest.mark.slow
def test_the_card_of_a_push(hub: HubServer, folder: Path) -> None:
    card = ModelCard(hub.repos["tester/distilled"]["README.md"].decode())
    data = card.data.to_dict()
    assert data == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "datasets": ["someone/prompts"],
        "tags": ["on-policy-distillation", "trl-opd", "trl", "lora", "arithmetic"],
    }
    text = card.text
    assert text.lstrip().startswith("# tester/distilled")
    assert "`base` (a local folder), distilled on-policy from `teacher` (a local folder)" in text
    assert str(folder) not in text
    assert 'PeftModel.from_pretrained(base, "tester/distilled")' in text
    assert "| Data | [someone/prompts](https://huggingface.co/datasets/someone/prompts), 16 prompts |" in text
    assert "| loss_fn | `importance_sampling` |" in text
    assert "| lr_scheduler_type | `constant` |" in text
    assert "| r | `4` |" in text
    assert "| teacher_kl | " in text
    assert "(step 0) | " in next(line for line in text.splitlines() if line.startswith("| eval_teacher_kl |"))
    assert "@misc{lu2025onpolicydistillation" in text


@pytest.mark.slow
def test_a_repository_is_named_and_made_when_it_is_needed(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """Without args.push_to_hub; student and teacher have no names, the card says so and metadata stays valid."""
    copy = download(hub, "tester/in-memory", tmp_path)
    assert_adapter_gives(copy, folder / "in-memory.pt", make_model(0))
    card = ModelCard((copy / "README.md").read_text())
    assert "base_model" not in card.data.to_dict()
    assert "a model that was made in memory, distilled on-policy from a model that was made in memory" in card.text
    assert "``" not in card.text.replace("```", "")
    assert 'PeftModel.from_pretrained(base, "tester/in-memory")' in card.text


@pytest.mark.slow
def test_full_weights_arrive_whole(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    copy = download(hub, "tester/whole", tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(copy).eval()(IDS).logits, torch.load(folder / "whole.pt"))
    card = ModelCard((copy / "README.md").read_text())
    assert card.data.to_dict()["library_name"] == "transformers"
    assert 'AutoModelForCausalLM.from_pretrained("tester/whole")' in card.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "repo", "cause", "words"),
    [
        ("broken", "tester/broken", "HfHubHTTPError", "500"),
        ("refused", "None", "ConnectError", "Connection refused"),
    ],
)
def test_a_push_that_fails_says_so_and_keeps_the_adapter(
    folder: Path, report: dict[str, Any], name: str, repo: str, cause: str, words: str
) -> None:
    error = report[name]["error"]
    assert error.startswith(f"RuntimeError: The push to '{repo}' on the Hub failed ({cause}: ")
    assert words in error
    assert f"the model is saved in '{folder / name}'" in error
    assert "trainer.push_to_hub()" in error
    assert report[name]["cause"] == cause
    assert_adapter_gives(folder / name, folder / f"{name}.pt", make_model(0))
    assert AutoTokenizer.from_pretrained(folder / name).get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.slow
def test_pushes_of_checkpoints_that_fail_do_not_end_the_run_but_are_told(
    hub: HubServer, folder: Path, report: dict[str, Any]
) -> None:
    assert report["broken-checkpoints"]["error"] is None
    assert report["steps"] == 3
    tried = [message for repo, message in hub.commits if repo == "tester/broken-checkpoints"]
    assert tried == [f"Training in progress, step {step}" for step in (1, 2, 3)]
    told = [text for text in report["broken-checkpoints"]["warnings"] if "push" in text]
    assert len(told) == 3
    assert all("'tester/broken-checkpoints' on the Hub failed (HfHubHTTPError" in text for text in told)
    for path in ("broken-checkpoints", "broken-checkpoints/checkpoint-3"):
        assert_adapter_gives(folder / path, folder / "broken-checkpoints.pt", make_model(0))
    assert load_file(folder / "broken-checkpoints/checkpoint-1/adapter_model.safetensors")


# ---- The card on its own


FACTS = CardFacts(
    name="tester/distilled",
    student="some/student",
    teacher="some/teacher",
    objective={"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.9}},
    lora=LoraConfig(r=8, target_modules="(q|v)_proj", base_model_name_or_path="some/student"),
    datasets=["some/prompts"],
    num_prompts=100,
)


def test_names_on_the_hub_are_metadata_and_links() -> None:
    card = model_card(FACTS)
    assert card.data.to_dict()["base_model"] == "some/student"
    assert card.data.to_dict()["datasets"] == ["some/prompts"]
    assert "[some/teacher](https://huggingface.co/some/teacher)" in card.text
    assert 'AutoPeftModelForCausalLM.from_pretrained("tester/distilled")' in card.text


def test_the_base_is_that_of_the_adapter_the_run_started_from() -> None:
    """A student given as an adapter is not what its own adapter must be put on."""
    card = model_card(replace(FACTS, student="some/adapter"))
    assert card.data.to_dict()["base_model"] == "some/student"
    assert "[some/adapter](https://huggingface.co/some/adapter), distilled on-policy" in card.text


@pytest.mark.parametrize("path", ["/data/models/student", "./student", "~/student", "a/b/student", "here"])
def test_a_path_is_not_metadata(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the student, an adapter's base or the data; and only its last part is shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    adapter = LoraConfig(r=8, base_model_name_or_path=path)
    for facts in (replace(FACTS, student=path, lora=None), replace(FACTS, student=path, teacher=path, lora=adapter)):
        card = model_card(replace(facts, datasets=[path]))
        assert not {"base_model", "datasets"} & set(card.data.to_dict())
        assert f"`{Path(path).name}` (a local folder)" in card.text
        assert path == "here" or path not in card.content


def test_the_base_as_its_own_teacher() -> None:
    assert (
        "distilled on-policy from its own base model (the adapter switched off)"
        in model_card(replace(FACTS, teacher="base")).text
    )


def test_a_bar_does_not_end_a_cell() -> None:
    assert "| target_modules | `(q\\|v)_proj` |" in model_card(FACTS).text


def test_every_table_has_the_columns_it_says(tmp_path: Path) -> None:
    history: list[dict[str, Any]] = [
        {"step": 0, "eval_teacher_kl": 2.0, "eval_runtime": 1.0, "eval_note": "text"},
        {"step": 1, "teacher_kl": 3.0, "loss": 1.0},
        {"step": 9, "teacher_kl": 1.5},
        {"step": 9, "eval_teacher_kl": 1.0, "eval_score": 0.5},
    ]
    text = model_card(replace(FACTS, history=history)).text
    assert "| teacher_kl | 3 (step 1) | 1.5 (step 9) |" in text
    assert "| eval_teacher_kl | 2 (step 0) | 1 (step 9) |" in text
    assert "| eval_score | 0.5 (step 9) | 0.5 (step 9) |" in text
    assert "eval_runtime" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            bars = {line.replace("\\|", "").count("|") for line in block.splitlines()}
            assert len(bars) == 1 and len(block.splitlines()) > 2, block


@pytest.mark.parametrize("change", [{}, {"lora": None}, {"student": "", "teacher": ""}, {"datasets": [], "num_prompts": None}])
def test_the_card_can_be_read_back_and_its_metadata_is_valid(change: dict[str, Any], tmp_path: Path) -> None:
    card: Callable[[], ModelCard] = lambda: ModelCard.load(tmp_path / "README.md")  # noqa: E731
    model_card(replace(FACTS, **change)).save(tmp_path / "README.md")
    data = card().data.to_dict()
    assert data["library_name"] == ("transformers" if "lora" in change else "peft")
    assert all(REPO_ID.fullmatch(name) for name in [data.get("base_model", "x"), *data.get("datasets", [])])
    assert len(data["tags"]) == len(set(data["tags"]))
    for heading in ("How to load it", "Training", "Versions", "Citation"):
        assert f"## {heading}\n\n" in card().text
