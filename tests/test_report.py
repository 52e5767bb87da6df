"""The report: what a run records, what its page holds. What a browser makes of it is in test_report_browser.py."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import random
import re
import subprocess
import sys
import threading
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import trl_opd
from trl_opd import Completion, Rollout, RolloutCallback, cli
from trl_opd.callbacks import log_table
from trl_opd.report import data, main
from trl_opd.report.page import render, write_page
from trl_opd.report.recorder import by_position, stop_figures
from trl_opd.report.serve import make_server

from .generated_run import HOSTILE, make_records, sample, write_run
from .helpers import make_dataset, make_trainer
from .processes import Processes


def on_page(page: str) -> dict[str, Any]:
    """What a page's script will read."""
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in data.read_records(folder) if record["kind"] == kind]


# ---- A run


class Keeping(RolloutCallback):
    """A user's own."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any, Any]] = []

    def on_rollout(self, args: Any, state: Any, control: Any, *, rollout: Any, batch: Any, trainer: Any) -> None:
        self.seen.append((state.global_step, rollout, batch))


def test_a_users_callback_sees_each_rollout_of_training_and_none_of_evaluation(tmp_path: Path) -> None:
    own = Keeping()
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_dataset(2)}
    make_trainer(tmp_path, callbacks=[own, TrainerCallback()], max_steps=3, **settings).train()
    assert [step for step, *_ in own.seen] == [0, 1, 2]
    for _, rollout, batch in own.seen:
        assert torch.equal(rollout.ids_BT, batch.ids_BT)
        assert batch.advantages_BT[batch.mask_BT].abs().sum() > 0


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    own = Keeping()
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": make_dataset(2)}
    trainer = make_trainer(tmp_path, report=True, callbacks=[own], max_steps=4, **settings)
    trainer.train()
    page = on_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step for step, _ in page["curves"]["teacher_kl"]] == [1, 2, 3, 4]
    kls = [value for _, value in page["curves"]["teacher_kl"]]
    assert kls == pytest.approx([entry["teacher_kl"] for entry in history], rel=1e-4)
    assert [step for step, _ in page["curves"]["eval_teacher_kl"]] == [0, 2, 4]
    assert page["curves"]["memory/process"][0][1] > 0.1
    sampled = {record["step"]: record["samples"] for record in records_of(tmp_path, "samples")}
    assert {1, 4} <= set(sampled), "the first and the last rollout are always there"
    for step, samples in sampled.items():
        _, _rollout, batch = own.seen[step - 1]
        for i, kept in enumerate(samples):  # 4 completions, so all are kept
            where = batch.mask_BT[i]
            assert kept["sampled_logps"] == pytest.approx(batch.sampled_logps_BT[i][where].tolist(), abs=6e-4)
            assert kept["teacher_logps"] == pytest.approx(batch.teacher_logps_BT[i][where].tolist(), abs=6e-4)
            assert kept["advantages"] == pytest.approx(batch.advantages_BT[i][where].tolist(), abs=6e-4)
    for record, (_, _, batch) in zip(records_of(tmp_path, "rollout"), own.seen, strict=True):
        total = (batch.sampled_logps_BT - batch.teacher_logps_BT)[batch.mask_BT].sum()
        assert sum(part for _, part, _ in record["position"]) == pytest.approx(float(total), rel=1e-4)
        assert sum(count for *_, count in record["position"]) == int(batch.mask_BT.sum())


def test_alternatives_are_the_teachers_at_the_same_place(tmp_path: Path) -> None:
    """Worked out from the teacher's whole logits: those before the token, that is."""
    own = Keeping()
    trainer = make_trainer(tmp_path, report=True, callbacks=[own], max_steps=1)
    trainer.train()
    _, rollout, _ = own.seen[0]
    (record,) = records_of(tmp_path, "samples")
    for row, kept in enumerate(record["samples"]):
        start, length = int(rollout.prompt_lengths_B[row]), int(rollout.completion_lengths_B[row])
        with torch.no_grad():
            logits = trainer.teacher.model(rollout.ids_BT[row : row + 1, : start + length]).logits[0]
        logps = logits[:, : trainer.vocab_size].log_softmax(-1)
        for i in range(length):
            best = logps[start + i - 1].topk(4)
            assert [logp for _, logp in kept["top"][i]] == pytest.approx(best.values.tolist(), abs=2e-3)
            for text, token in zip((text for text, _ in kept["top"][i]), best.indices.tolist(), strict=True):
                assert text.strip() == trainer.processing_class.decode([token]).strip()
            written = [text for text, _ in kept["top"][i]]
            if kept["tokens"][i] in written:
                assert kept["top"][i][written.index(kept["tokens"][i])][1] == pytest.approx(kept["teacher_logps"][i], abs=2e-3)


def test_a_resumed_run_goes_on_with_its_report(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"report": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, **settings).train()
    whole = data.page_data(data.read_records(tmp_path))
    make_trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = data.page_data(data.read_records(tmp_path))
    assert resumed["curves"]["teacher_kl"] == whole["curves"]["teacher_kl"]
    assert [r["step"] for r in resumed["rollouts"]] == [1, 2, 3, 4]
    make_trainer(tmp_path, **{**settings, "max_steps": 1}).train()
    assert [step for step, _ in data.page_data(data.read_records(tmp_path))["curves"]["teacher_kl"]] == [1]


def test_a_run_that_fails_leaves_a_report(tmp_path: Path) -> None:
    """Also of the steps since the last refresh: the page is written when Python ends."""
    program = f"""
from pathlib import Path
from tests.helpers import make_trainer
def reward(completions, trainer_state, **columns):
    if trainer_state.global_step == 2:
        raise KeyboardInterrupt
    return [0.0] * len(completions)
make_trainer(Path({str(tmp_path)!r}), report=True, max_steps=5, reward_funcs=reward, num_generations=2).train()
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert "KeyboardInterrupt" in ended.stderr
    page = on_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [step for step, _ in page["curves"]["loss"]] == [1, 2]


def test_no_report_unless_wanted(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "_report").exists()


def train_with_report(folder: Path) -> None:
    make_trainer(folder, report=True, max_steps=2).train()


@pytest.mark.dist
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_of_several_processes_the_main_one_writes(tmp_path: Path, two: Processes, how: str) -> None:
    two.run(how, train_with_report, tmp_path)
    assert len(records_of(tmp_path, "run")) == 1
    assert [record["step"] for record in records_of(tmp_path, "log") if "loss" in record["figures"]] == [1, 2]
    samples = [sample for record in records_of(tmp_path, "samples") for sample in record["samples"]]
    assert samples
    assert all(len(sample["top"]) == len(sample["tokens"]) for sample in samples)
    assert on_page((tmp_path / "report.html").read_text(encoding="utf-8"))["samples"]["steps"]


def test_the_report_is_not_in_what_a_push_sends(tmp_path: Path) -> None:
    """Trainer sends all of output_dir but what begins with an underscore."""
    write_run(tmp_path, make_records(1, 1, 3))
    assert write_page(tmp_path) == tmp_path / "report.html"
    data.set_aside(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert write_page(tmp_path) == tmp_path / "_report" / "report.html"
    other = write_run(tmp_path / "other", make_records(1, 1, 3))
    assert write_page(other, pushed=True) == other / "_report" / "report.html"


# ---- Figures


def two_completions() -> tuple[Rollout, torch.Tensor]:
    """One of four tokens that stopped, one of three that was cut; the teacher's log-probs are easy to tell apart."""
    completions = [
        Completion(ids=[4, 5, 6, 1], logps=[-1.0, -2.0, -3.0, -4.0], stopped=True),
        Completion(ids=[7, 8, 9], logps=[-1.0, -1.0, -1.0], stopped=False),
    ]
    rows = [{"prompt": ""}] * 2
    rollout = Rollout.build([[2], [2, 3]], completions, rows, pad_id=0, device=torch.device("cpu"))
    teacher_logps_BT = torch.tensor([[9.0, -2.0, -4.0, -6.0, -8.0], [9.0, 9.0, -3.0, -3.0, -3.0]])
    return rollout, teacher_logps_BT


def test_kl_by_place_by_hand() -> None:
    """Places 0, 1-2 and 3: s - q is 1, 2, 3, 4 and 2, 2, 2."""
    assert by_position(*two_completions()) == [[0, 3.0, 2.0], [1, 9.0, 4.0], [3, 4.0, 1.0]]


def test_stop_tokens_by_hand() -> None:
    assert stop_figures(*two_completions()) == {"completions": 2, "stopped": 1, "student": -4.0, "teacher": -8.0}


# ---- Records and page


@pytest.mark.parametrize("count", [1, 2, 3, 199, 200, 201, 1000])
def test_thinning_keeps_first_and_last(count: int) -> None:
    kept = data.thinned(list(range(count)), 200)
    assert len(kept) == min(count, 200) == len(set(kept))
    assert (kept[0], kept[-1]) == (0, count - 1)
    gaps = {b - a for a, b in itertools.pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_came_after_the_checkpoint_is_dropped_and_cut_lines_do_no_harm(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(5, 1, 2))
    with data.records_path(tmp_path).open("a") as file:
        file.write('{"kind": "log", "st')
        file.write('\n{"kind": "run", "facts": {}}\n{"kind": "begin", "step": 3}\n')
    page = data.page_data(data.read_records(tmp_path))
    assert [step for step, _ in page["curves"]["loss"]] == [1, 2, 3]
    assert [record["step"] for record in page["samples"]["steps"]] == [1, 2, 3]


def test_infinities_do_not_break_a_page(tmp_path: Path) -> None:
    records = make_records(1, 0, 0)
    kept = sample(random.Random(0), ["a", "b", "c"])
    kept |= {"teacher_logps": [-math.inf, math.nan, -1.0], "advantages": [-math.inf, math.nan, 0.5]}
    records.append({"kind": "samples", "step": 1, "samples": [kept]})
    records[-2]["figures"] |= {"teacher_kl": math.inf, "odd": math.nan}
    page = on_page(render(write_run(tmp_path, records)))
    assert page["samples"]["steps"][-1]["samples"][0]["q"] == [-1_000_000, None, -100]
    assert "teacher_kl" not in page["curves"]
    assert "odd" not in page["curves"]


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    records = make_records(1, 1, 0, texts=HOSTILE)
    page = render(write_run(tmp_path, records))
    found = on_page(page)["samples"]
    assert [found["texts"][i] for i in found["steps"][0]["samples"][0]["tokens"]] == HOSTILE
    assert page.count("</script>") == 2
    assert "onerror" not in page


def test_a_folder_name_is_text_too(tmp_path: Path) -> None:
    page = render(write_run(tmp_path / "<b>run", make_records(1, 1, 1)))
    assert "&lt;b&gt;run" in page
    assert "<b>run" not in page


def test_a_page_asks_nothing_of_a_network(tmp_path: Path) -> None:
    page = render(write_run(tmp_path, make_records(1, 1, 1)))
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_size_of_a_long_run(tmp_path: Path) -> None:
    path = write_page(write_run(tmp_path, make_records(200, 8, 100)))
    assert path.stat().st_size < 5e6
    assert len(on_page(path.read_text(encoding="utf-8"))["samples"]["steps"]) == 200


def test_a_longer_run_is_thinned_to_the_same_size(tmp_path: Path) -> None:
    path = write_page(write_run(tmp_path, make_records(300, 8, 200)))
    steps = [record["step"] for record in on_page(path.read_text(encoding="utf-8"))["samples"]["steps"]]
    assert (steps[0], steps[-1]) == (1, 300)
    assert path.stat().st_size < 5e6


# ---- The command


def test_the_command_rebuilds_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, make_records(2, 1, 2))
    assert main([str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()


def test_a_run_without_records_shows_its_curves(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    history = [{"step": 1, "loss": 1.0, "teacher_kl": 0.5}, {"step": 2, "loss": 0.5, "teacher_kl": 0.25}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert on_page(render(tmp_path))["curves"]["teacher_kl"] == [[1, 0.5], [2, 0.25]]


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "Pass the output_dir of a run" in capsys.readouterr().err


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    """The package's own __init__ stands aside here; that it is light is another matter."""
    write_run(tmp_path, make_records(1, 1, 1))
    program = f"""
import sys, types
package = types.ModuleType("trl_opd")
package.__path__ = [{str(Path(trl_opd.__file__).parent)!r}]
sys.modules["trl_opd"] = package
from trl_opd.report import main
assert main([{str(tmp_path)!r}]) == 0
print(sorted({{"torch", "transformers", "pandas", "numpy"}} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("[]\n")


def test_the_server_gives_the_newest_page(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(1, 1, 1))
    with make_server(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"

        def get(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}{path}") as answer:
                return answer.read().decode()

        before = get("/version")
        assert f'content="{before}"' in get("/")
        write_run(tmp_path, make_records(2, 1, 1))
        assert get("/version") != before
        assert [record["step"] for record in on_page(get("/"))["samples"]["steps"]] == [1, 2]
        server.shutdown()


# ---- Trackers


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_completions_go_to_trackers_as_a_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is installed: a module with the two functions that both have stands in."""
    logged: list[Any] = []
    fake: Any = types.ModuleType(name)
    fake.Table = lambda dataframe: dataframe
    fake.log = logged.append
    monkeypatch.setitem(sys.modules, name, fake)
    record = {"step": 1, "dataset": "train", "prompt": "p", "completion": "c", "stopped": True, "reward_advantage": 0.0}
    record |= {"tokens": ["c", "d"], "trained": [True, True], "advantages": [-1.0, -2.0]}
    log_table([record], ["tensorboard", name])
    (table,) = logged
    assert table["completions"].to_dict("records") == [
        {"step": 1, "dataset": "train", "prompt": "p", "completion": "c", "stopped": True, "reward_advantage": 0.0}
        | {"mean_advantage": -1.5, "length": 2}
    ]
    log_table([record], ["tensorboard"])
    assert len(logged) == 1
