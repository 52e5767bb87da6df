"""`make bench-learning`: what its tables are made of, by hand, and that every arm trains on the same task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learning_tables
import pytest
from learning_arms import ARMS, Watch, train
from learning_figures import (
    Point,
    as_points,
    best_rate,
    curve_of,
    first_reach,
    flops,
    gap_recovery,
    matrix_weights,
    spread_reached,
)
from learning_tasks import TASKS, chain_model, chain_tokenizer, exact_match, running_sums

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "learning.py"
CURVE = [Point(0, 0.5, 0, 0), Point(2, 0.7, 100, 300), Point(4, 0.6, 200, 600), Point(8, 0.9, 400, 1200)]
PAIR = {"student": 0.5, "teacher": 0.9, "student_weights": 10, "teacher_weights": 100}


def finished(arm: str, rate: float, seed: int, last: float, task: str = "chain") -> dict[str, Any]:
    """A run as the file of results has it."""
    curve = [*CURVE[:-1], replace(CURVE[-1], accuracy=last)]
    return {"task": task, "arm": arm, "steps": 8, "batch": 4, "rate": rate, "seed": seed, "curve": as_points(curve)}


def found_of(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": {"chain": PAIR}, "runs": dict(enumerate(runs)), "headline": {}}


def test_flops_by_hand() -> None:
    # 7 tokens, N 10 and 100: the student writes, 2·10; the teacher scores, 2·100; forward and backward, 6·10
    assert flops("sampled", 7, 10, 100) == 7 * (20 + 200 + 60)
    assert flops("trl", 7, 10, 100) == flops("full", 7, 10, 100) == flops("sampled", 7, 10, 100)
    assert flops("grpo", 7, 10, 100) == 7 * (20 + 60)  # nobody else
    assert flops("sft", 7, 10, 100) == 7 * (200 + 60)  # the teacher writes


def test_weights_that_multiply_are_counted_once() -> None:
    model: Any = chain_model(chain_tokenizer())  # 13 tokens, width 96, 192 in the MLP, 2 layers
    layers, head = 2 * (4 * 96 * 96 + 3 * 96 * 192), 13 * 96
    assert matrix_weights(model) == layers + head
    model.lm_head.weight = model.model.embed_tokens.weight
    assert matrix_weights(model) == layers + head


def test_gap_recovery_and_first_reach_by_hand() -> None:
    assert gap_recovery(0.7, 0.5, 0.9) == pytest.approx(0.5)
    assert gap_recovery(0.4, 0.5, 0.9) == pytest.approx(-0.25)
    assert first_reach(CURVE, 0.7) == CURVE[1]  # that it fell again afterwards is another matter
    assert first_reach(CURVE, 0.71) == CURVE[3]
    assert first_reach(CURVE, 0.91) is None
    assert curve_of(as_points(CURVE)) == CURVE


def test_best_rate_of_equal_ones_is_the_smallest() -> None:
    assert best_rate({3e-4: 0.5, 1e-3: 0.9, 3e-3: 0.8}) == 1e-3
    assert best_rate({3e-3: 0.9, 1e-3: 0.9, 3e-4: 0.5}) == 1e-3


def test_spread_says_how_many_reached() -> None:
    assert spread_reached([1.0, 3.0], "{:.0f}".format) == "2 (1 to 3)"
    assert spread_reached([1.0, None, 3.0], "{:.0f}".format) == "2 (1 to 3), 2 of 3 runs"
    assert spread_reached([None], "{:.0f}".format) == "not reached"


def test_the_seed_that_chose_the_rate_is_not_reported() -> None:
    runs = [finished("full", 1e-3, 0, 0.8), finished("full", 3e-3, 0, 0.9), finished("full", 3e-3, 1, 0.7)]
    runs += [finished("full", 1e-3, 2, 0.9), finished("full", 3e-3, 2, 0.8), finished("full", 3e-3, 3, 0.9, task="addition")]
    told = learning_tables.reported(found_of(*runs), "chain")
    assert [(run["rate"], run["seed"]) for run in told["full"]] == [(3e-3, 1), (3e-3, 2)]


def test_a_table_by_hand() -> None:
    found = found_of(*(finished("full", 1e-3, seed, last) for seed, last in [(0, 0.9), (1, 0.9), (2, 0.6)]))
    row = [cell.strip() for cell in learning_tables.show_task(found, "chain").splitlines()[-1].strip("|").split("|")]
    # (0.9 - 0.5) / 0.4 = 1 and (0.6 - 0.5) / 0.4; half the gap is 0.7, eight tenths 0.82
    recovery, half, most = "0.62 (0.25 to 1.00)", "0.1 (0.1 to 0.1)", "0.4 (0.4 to 0.4), 1 of 2 runs"
    assert row == ["full", "0.001", "2", "0.750", recovery, half, most, "0 (0 to 0)", "0 (0 to 0), 1 of 2 runs", "0.4", "0"]
    assert learning_tables.costs(found, finished("full", 1e-3, 1, 0.9), 0.8) == (400, 1200 * 280 / 1e9)


def test_the_quickest_rate_by_hand() -> None:
    slow = finished("full", 3e-3, 0, 0.9)
    slow["curve"][1]["accuracy"] = 0.5  # with this rate half the gap, 0.7, is first seen at the end
    runs = [finished("full", 1e-3, 0, 0.8), slow, finished("full", 3e-3, 1, 0.9)]
    row = [cell.strip() for cell in learning_tables.show(found_of(*runs)).splitlines()[-1].strip("|").split("|")]
    assert row == ["full", "0.1, 0 (rate 0.001)", "0.4, 0 (rate 0.003)"]


def test_the_headline_by_hand() -> None:
    grpo = [Point(0, 0.5, 0, 0), Point(160, 0.89, 1, 1), Point(320, 0.9, 2, 2)]  # 0.5 + 0.95 · 0.4 = 0.88, at step 160
    runs = [{"steps": n, "rate": 1e-3, "accuracy": end} for n, end in [(10, 0.87), (20, 0.88), (40, 0.9)]]
    choice = {"seed": 0, "grpo": as_points(grpo), "distilled": []}

    def last_row(**entry: Any) -> list[str]:
        lines = learning_tables.show_headline([choice, {"seed": 1, "grpo": as_points(grpo), **entry}]).splitlines()
        assert len(lines) == 3  # the seed of the choice is not told
        return [cell.strip() for cell in lines[-1].strip("|").split("|")]

    ends = ["0.870 (0.92)", "0.880 (0.95)", "0.900 (1.00)"]
    assert last_row(distilled=runs) == ["1", "0.500", "0.900 (320)", "160", *ends, "20", "16.0", "8.0"]
    assert last_row(distilled=runs[:1])[-3:] == ["not reached", "", ""]


def test_chain_by_hand() -> None:
    assert running_sums("3141") == "3489"
    assert running_sums("5505") == "5005"
    task = TASKS["chain"]
    rows, tokenizer = task.prompts()[:4], task.tokenizer()
    assert [len(ids) for ids in tokenizer(rows["prompt"])["input_ids"]] == [41] * 4
    assert [len(ids) for ids in tokenizer(rows["answer"])["input_ids"]] == [40] * 4
    assert exact_match([rows["answer"][0], rows["answer"][0] + "1"], rows["answer"][:1] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("name", list(TASKS))
def test_prompts_are_few_and_none_of_them_is_evaluated_on(name: str) -> None:
    task = TASKS[name]
    prompts = task.prompts()["prompt"][:]
    assert len(prompts) == task.pool
    assert not set(prompts) & set(task.heldout()["prompt"])
    assert task.pool < task.batch * task.steps / 4  # each comes again
    assert task.tokenizer().eos_token_id == task.load("student").generation_config.eos_token_id


def test_rows_of_another_task_are_refused() -> None:
    task = TASKS["addition"]
    watch, tokenizer = Watch(task, []), task.tokenizer()
    prompt = tokenizer(task.prompts()["prompt"][0])["input_ids"]
    stop, digit = tokenizer.eos_token_id, 5
    watch.see([(prompt, [digit, stop]), (prompt, [digit] * 5)])
    assert (watch.rollout_tokens, watch.context_tokens) == (7, 23)
    with pytest.raises(SystemExit, match="no prompt"):
        watch.see([([stop, *prompt], [digit, stop])])  # as if a token had been added
    for completion in ([digit], [digit, stop, stop], [digit] * 6):
        with pytest.raises(SystemExit, match="neither ends"):
            watch.see([(prompt, completion)])
    watch = Watch(task, [])
    watch.see([(prompt, [digit, stop])])
    with pytest.raises(SystemExit, match="1 completions in 1 steps of 128"):
        watch.on_step_end(None, SimpleNamespace(global_step=1), None, model=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains(arm: str, name: str) -> None:
    """Also that each has the task's prompts and stop token, and all completions of a step: the watch would refuse others."""
    task = replace(TASKS[name], num_heldout=16)
    _, curve = train(arm, task, task.load("teacher"), steps=2, rate=1e-3, seed=0, evaluate_at=[0, 2])
    assert [point.step for point in curve] == [0, 2]
    tokens = curve[-1].rollout_tokens
    prompt = len(task.tokenizer()(task.prompts()["prompt"][0])["input_ids"])
    assert curve[-1].context_tokens == tokens + 2 * task.batch * prompt
    assert 3 * task.batch * 2 < tokens <= task.max_completion_length * task.batch * 2


@pytest.mark.slow
def test_the_driver_and_that_it_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "learning.json"
    arguments = ["--tasks", "addition", "headline", "--arms", "sampled", "grpo", "--seeds", "1", "--steps", "2"]
    command = [sys.executable, str(SCRIPT), *arguments, "--results", str(results)]
    for again in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        assert "| sampled |" in done.stdout
        assert ("runs addition/sampled" in done.stdout) is not again
    found = json.loads(results.read_text())
    assert len(found["runs"]) == 2 * (4 + 1)
    assert len(found["headline"]) == 2  # one to choose the rate
    learning_tables.draw(found, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 0
