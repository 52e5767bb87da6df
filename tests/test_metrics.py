"""Every figure in the logs, worked out a second time by hand; and the list of them in docs/metrics.md."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.batch import ScoredBatch
from trl_opd.loss import Stats
from trl_opd.metrics import MAX_VALUES, Metrics, _summarize

from .helpers import make_dataset, make_model, make_trainer

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
CLOCKED = ("time/", "tokens_per_second")
TRAINERS_OWN = {"loss", "grad_norm", "learning_rate", "epoch", "step"}


def digits(completions: list[str], **_: Any) -> list[float | None]:
    """A reward that does not apply to completions without a digit."""
    counts = [sum(c.isdigit() for c in text) for text in completions]
    return [float(count) if count else None for count in counts]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the number of tokens."""
    return [float(len(ids)) for ids in completion_ids]


def training_logs(run: Any) -> list[dict[str, float]]:
    return [entry for entry in run.state.log_history if "loss" in entry]


# ---- Metrics by hand


def reduced(metrics: Metrics) -> dict[str, float]:
    """Without the window's length."""
    return {name: value for name, value in metrics.reduce().items() if name != "time/window"}


def test_a_mean_is_a_sum_over_a_count() -> None:
    """6 over 3 and 4 over 1 are 10 over 4, not the mean of 2 and 4."""
    metrics = Metrics()
    metrics.add("a", torch.tensor(6.0), torch.tensor(3))
    metrics.add("a", 4.0)
    assert reduced(metrics) == {"a": 2.5}


def test_a_mean_of_nothing_is_not_logged() -> None:
    metrics = Metrics()
    metrics.add("a", torch.tensor(0.0), torch.tensor(0))
    metrics.add_values("teacher_kl", torch.zeros(0))
    metrics.add_values("advantage/mean", torch.zeros(0))
    metrics.add("ratio/mean", 0.0, 0)
    metrics.add("ratio/square", 0.0, 0)
    metrics.add_extremes(torch.zeros(0), low="low", high="high")
    assert reduced(metrics) == {}
    assert reduced(metrics) == {}  # an empty window


def test_p99_is_the_value_that_99_percent_do_not_exceed() -> None:
    metrics = Metrics()
    for part in torch.arange(1.0, 201.0).flip(0).split(30):
        metrics.add_values("teacher_kl", part)
    assert reduced(metrics) == {"teacher_kl": 100.5, "teacher_kl/p99": 198.0}


def test_p99_of_infinite_values_is_infinite() -> None:
    """As a teacher's -inf makes them; between two infinities there is no NaN."""
    metrics = Metrics()
    metrics.add_values("teacher_kl", torch.tensor([1.0, math.inf, math.inf]))
    assert reduced(metrics) == {"teacher_kl": math.inf, "teacher_kl/p99": math.inf}


def test_spread_of_advantages() -> None:
    """-3, 1, 0, 2: mean 0, variance 14 / 4; one of four is negative; the greatest holds 3 of 6."""
    metrics = Metrics()
    metrics.add_values("advantage/mean", torch.tensor([-3.0, 1.0]))
    metrics.add_values("advantage/mean", torch.tensor([0.0, 2.0]))
    assert reduced(metrics) == pytest.approx(
        {
            "advantage/mean": 0.0,
            "advantage/std": math.sqrt(3.5),
            "advantage/frac_negative": 0.25,
            "advantage/top1pct_share": 0.5,
        }
    )


def test_the_share_of_the_top_percent() -> None:
    """Of 200 tokens the top 2: -100 and 50 out of 100 + 50 + 198."""
    metrics = Metrics()
    metrics.add_values("advantage/mean", torch.tensor([*[1.0] * 99, -100.0, 50.0, *[-1.0] * 99]))
    assert reduced(metrics)["advantage/top1pct_share"] == pytest.approx(150 / 348)


def test_the_share_of_the_top_percent_where_all_advantages_are_zero() -> None:
    metrics = Metrics()
    metrics.add_values("advantage/mean", torch.zeros(5))
    assert reduced(metrics)["advantage/top1pct_share"] == 0.0


def test_effective_sample_size() -> None:
    """Ratios 1 and 3: (mean 2)² over a mean square of 5."""
    metrics = Metrics()
    metrics.add("ratio/mean", torch.tensor(4.0), torch.tensor(2))
    metrics.add("ratio/square", torch.tensor(10.0), torch.tensor(2))
    assert reduced(metrics) == pytest.approx({"ratio/mean": 2.0, "ratio/ess": 0.8})


def test_extremes_over_a_window() -> None:
    metrics = Metrics()
    for values in ([3, 5], [], [4, 1]):
        metrics.add_extremes(torch.tensor(values), low="low", high="high")
    metrics.add_extremes(torch.tensor([-7.0]), high="other")
    assert reduced(metrics) == {"low": 1, "high": 5, "other": -7.0}


def test_many_values_are_thinned_evenly() -> None:
    """The mean stays exact; a quantile keeps its place."""
    metrics, n = Metrics(), 5 * MAX_VALUES
    metrics.add_values("teacher_kl", torch.arange(n) / n)
    figures = reduced(metrics)
    assert figures["teacher_kl"] == pytest.approx(0.5, rel=1e-4)
    assert figures["teacher_kl/p99"] == pytest.approx(0.99, abs=1e-4)


def test_processes_with_unequally_many_values_are_thinned_alike() -> None:
    """Of the smaller part every value would be kept, and weigh twice."""
    big, small = Metrics(), Metrics()
    big.add_values("advantage/mean", torch.full((2 * MAX_VALUES,), 1.0))
    small.add_values("advantage/mean", torch.full((MAX_VALUES,), -1.0))
    figures = _summarize([big.window(), small.window()])
    assert figures["advantage/frac_negative"] == pytest.approx(1 / 3, rel=1e-3)


def test_a_window_ends_with_reduce_but_not_with_totals() -> None:
    metrics = Metrics()
    metrics.add("a", 1.0)
    metrics.count("tokens", 5)
    metrics.count("tokens", 2)
    assert metrics.totals() == {"tokens": 7}
    assert reduced(metrics) == {"a": 1.0, "tokens": 7}
    assert metrics.totals() == {}
    assert reduced(metrics) == {}


def test_seconds_are_counted_also_if_something_fails() -> None:
    metrics = Metrics()
    with metrics.timed("rollout"):
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), metrics.timed("rollout"):
        time.sleep(0.01)
        raise ZeroDivisionError
    figures = metrics.reduce()
    assert 0.02 <= figures["time/rollout"] <= figures["time/window"]


def test_windows_of_two_processes_are_joined() -> None:
    """Sums and counts add up, also of a name that only one has; extremes and the slowest clock win."""
    empty: dict[str, Any] = {"sums": {}, "values": {}, "totals": {}, "lows": {}, "highs": {}, "seconds": {}}
    one = {
        **empty,
        "sums": {"a": (6.0, 3.0), "b": (1.0, 2.0)},
        "values": {"teacher_kl": (1, np.array([9.0, 1.0]))},
        "totals": {"tokens": 5.0},
        "lows": {"low": 4},
        "highs": {"high": 4},
        "seconds": {"train": 2.0, "sync": 1.0},
    }
    other = {
        **empty,
        "sums": {"a": (4.0, 1.0)},
        "values": {"teacher_kl": (1, np.array([2.0]))},
        "totals": {"tokens": 2.0, "teacher_tokens": 3.0},
        "lows": {"low": 3},
        "highs": {"high": 3},
        "seconds": {"train": 3.0},
    }
    assert _summarize([one, other]) == {
        "a": 2.5,
        "b": 0.5,
        "teacher_kl/p99": 9.0,
        "tokens": 7.0,
        "teacher_tokens": 3.0,
        "low": 3,
        "high": 4,
        "time/train": 3.0,
        "time/sync": 1.0,
    }


# ---- The figures of a run, by hand from what was trained on


class Recording(OnPolicyDistillationTrainer):
    """Keeps each rollout with its scores, and each micro-batch with the log-probs and entropies of its update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollouts: list[Any] = []
        self.updates: list[tuple[ScoredBatch, Tensor, Tensor]] = []

    def rollout_and_scores(self, rows: list[dict[str, Any]], *stream: int) -> Any:
        result = super().rollout_and_scores(rows, *stream)
        if stream[0] == 0:
            self.rollouts.append(result)
        return result

    def compute_policy_loss(
        self, logps_BT: Tensor, batch: ScoredBatch, num_items: Tensor | int | None
    ) -> tuple[Tensor, Stats]:
        self.updates.append((batch, logps_BT.detach().clone(), own_entropy(self, batch)))
        return super().compute_policy_loss(logps_BT, batch, num_items)


def own_entropy(run: Any, batch: ScoredBatch) -> Tensor:
    """(B, T), from the model's logits; padding is on the right."""
    with torch.no_grad():
        logps = run.model(input_ids=batch.ids_BT, attention_mask=batch.attention_mask_BT.long()).logits.log_softmax(dim=-1)
    entropy_BT = torch.zeros(batch.ids_BT.shape)
    entropy_BT[:, 1:] = -(logps.exp() * logps).sum(dim=-1)[:, :-1]
    return entropy_BT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two logs of two optimizer steps of two micro-batches of two completions; a rollout has two steps."""
    one = make_trainer(
        tmp_path_factory.mktemp("run"),
        cls=Recording,
        eval_dataset=make_dataset(2),
        reward_funcs=[digits, length],
        reward_weights=[1.0, 0.5],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        num_substeps=2,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 0.98, "clip_high_threshold": 1.02},
        compute_post_kl=True,
        learning_rate=3e-2,
        max_completion_length=8,
    )
    one.train()
    return one


def tokens_of(run: Any, log: int) -> list[dict[str, float]]:
    """The action tokens of a log's four micro-batches, one by one."""
    tokens = []
    for batch, logps_BT, entropy_BT in run.updates[4 * log : 4 * log + 4]:
        for row, t in batch.mask_BT.nonzero().tolist():
            tokens.append(
                {
                    "sampled": batch.sampled_logps_BT[row, t].item(),
                    "teacher": batch.teacher_logps_BT[row, t].item(),
                    "advantage": batch.advantages_BT[row, t].item(),
                    "logp": logps_BT[row, t].item(),
                    "entropy": entropy_BT[row, t].item(),
                }
            )
    return tokens


def expected_figures(run: Any, log: int) -> dict[str, float]:
    """Each figure from lists of numbers."""
    tokens = tokens_of(run, log)
    rollout, _, rewards_BF, _ = run.rollouts[log]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    kl = sorted(t["sampled"] - t["teacher"] for t in tokens)
    advantages = [t["advantage"] for t in tokens]
    sizes = sorted((abs(a) for a in advantages), reverse=True)
    ratios = [math.exp(t["logp"] - t["sampled"]) for t in tokens]
    lengths, stopped = [len(ids) for ids in rollout.completion_ids()], rollout.stopped_B.tolist()
    by_func = {"digits": rewards_BF[:, 0].tolist(), "length": rewards_BF[:, 1].tolist()}
    totals = [(0.0 if math.isnan(d) else d) + 0.5 * n for d, n in zip(by_func["digits"], by_func["length"], strict=True)]
    clipped = [r > 1.02 if a > 0 else r < 0.98 for r, a in zip(ratios, advantages, strict=True)]
    return {
        "teacher_kl": mean(kl),
        "teacher_kl/p99": kl[math.ceil(0.99 * len(kl)) - 1],
        "advantage/mean": mean(advantages),
        "advantage/std": math.sqrt(mean([a * a for a in advantages]) - mean(advantages) ** 2),
        "advantage/frac_negative": mean([float(a < 0) for a in advantages]),
        "advantage/top1pct_share": sum(sizes[: max(1, len(sizes) // 100)]) / sum(sizes),
        "entropy": mean([t["entropy"] for t in tokens]),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/stopped_fraction": mean([float(s) for s in stopped]),
        "completions/truncated_fraction": mean([float(not s) for s in stopped]),
        "prompts/truncated_fraction": 0.0,
        "sampler_kl/v1": mean([t["sampled"] - t["logp"] for t in tokens]),
        "sampler_kl/v2": mean([(t["sampled"] - t["logp"]) ** 2 for t in tokens]) / 2,
        "ratio/mean": mean(ratios),
        "ratio/max": max(ratios),
        "ratio/ess": mean(ratios) ** 2 / mean([r * r for r in ratios]),
        "clip_fraction": mean([float(c) for c in clipped]),
        "reward": mean(totals),
        "reward/digits": mean([d for d in by_func["digits"] if not math.isnan(d)]),
        "reward/length": mean(by_func["length"]),
        "tokens": sum(sum(map(len, rollout.completion_ids())) for rollout, *_ in run.rollouts[: log + 1]),
        "teacher_tokens": sum(int(rollout.attention_mask_BT.sum()) for rollout, *_ in run.rollouts[: log + 1]),
    }


@pytest.mark.parametrize("log", [0, 1])
def test_every_figure_by_hand(run: Any, log: int) -> None:
    """Over a window of two optimizer steps, of which the second is off-policy by one."""
    logged = training_logs(run)[log]
    expected = expected_figures(run, log)
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert 0 < expected["clip_fraction"] < 1
    assert logged["ratio/max"] > 1.01


def test_nothing_else_is_logged(run: Any) -> None:
    """Apart from what Trainer logs, clocks, and what has a test of its own."""
    others = {
        "update_kl/v1",
        "update_kl/v2",
        "rollout/staleness",
        "tokens_per_second",
        *(f"time/{p}" for p in ("sync", "rollout", "teacher", "train", "eval")),
    }
    for log, entry in enumerate(training_logs(run)):
        assert set(entry) - TRAINERS_OWN - others == set(expected_figures(run, log))
        assert others < set(entry)


def test_update_kl_is_how_far_the_policy_moved_on_the_rollouts_tokens(run: Any) -> None:
    """The weights after the last update are still there: they give the second log's figure."""
    change = []
    with torch.no_grad():
        for batch, _, _ in run.updates[4:]:
            logps = run.model(input_ids=batch.ids_BT, attention_mask=batch.attention_mask_BT.long()).logits.log_softmax(dim=-1)
            logps = logps[:, :-1].gather(2, batch.ids_BT[:, 1:, None]).squeeze(2)
            change.append((batch.sampled_logps_BT[:, 1:] - logps)[batch.mask_BT[:, 1:]])
    change = torch.cat(change).double()
    logged = training_logs(run)[1]
    assert logged["update_kl/v1"] == pytest.approx(float(change.mean()), rel=1e-4)
    assert logged["update_kl/v2"] == pytest.approx(float(change.square().mean()) / 2, rel=1e-4)
    assert logged["update_kl/v2"] > 1e-4


def test_evaluation_logs_what_a_rollout_shows(run: Any) -> None:
    evaluated = next(entry for entry in run.state.log_history if "eval_teacher_kl" in entry)
    of_rollouts = ("teacher_kl", "completions/", "prompts/", "reward")
    expected = {f"eval_{name}" for name in expected_figures(run, 0) if name.startswith(of_rollouts)}
    clocks = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert set(evaluated) - clocks - TRAINERS_OWN == expected


def test_figures_are_plain_numbers(run: Any) -> None:
    """So that they can be printed and written wherever a logger wants to."""
    assert all(type(value) in (int, float) for entry in run.state.log_history for value in entry.values())


def test_figures_do_not_depend_on_how_a_step_is_split(tmp_path: Path) -> None:
    """8 completions in 1, 2 and 4 micro-batches of unequal token counts."""
    logs = []
    for size in (8, 4, 2):
        one = make_trainer(
            tmp_path,
            reward_funcs=[digits, length],
            num_generations=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            loss_fn="cispo",
            compute_post_kl=True,
            max_completion_length=8,
        )
        one.train()
        logs.append([{k: v for k, v in entry.items() if not k.startswith(CLOCKED)} for entry in training_logs(one)])
    for other in logs[1:]:
        for one, two in zip(logs[0], other, strict=True):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*does more to its logits")
def test_all_completions_masked(tmp_path: Path) -> None:
    """Nothing to train on or to average: zero loss, unchanged weights, finite figures; a mean over no token is left out."""
    one = make_trainer(
        tmp_path,
        model=never_stops(),
        train_dataset=make_dataset(8),
        mask_truncated_completions=True,
        reward_funcs=digits,
        num_generations=2,
        gradient_accumulation_steps=2,
        num_substeps=2,
        compute_post_kl=True,
        log_completions=True,
        loss_fn="ppo",
        eval_dataset=make_dataset(2),
        eval_strategy="steps",
        eval_steps=1,
        max_completion_length=3,
    )
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one.train()
    assert all(torch.equal(before[name], p) for name, p in one.model.named_parameters())
    assert [entry["loss"] for entry in training_logs(one)] == [0.0, 0.0]
    for entry in one.state.log_history:
        assert all(math.isfinite(value) for value in entry.values()), entry
        assert not any("teacher_kl" in name or "advantage/" in name or "ratio/" in name for name in entry)
    assert training_logs(one)[0]["completions/truncated_fraction"] == 1.0
    assert training_logs(one)[0]["tokens"] == 0


def test_a_micro_batch_without_a_token_does_not_count(tmp_path: Path) -> None:
    """Some completions are cut and masked: means are over the tokens that are left."""
    one = make_trainer(
        tmp_path,
        cls=Recording,
        mask_truncated_completions=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=1,
        seed=7,
    )
    one.train()
    masked = [not batch.mask_BT.any() for batch, _, _ in one.updates]
    assert any(masked) and not all(masked)
    kl = torch.cat([(b.sampled_logps_BT - b.teacher_logps_BT)[b.mask_BT] for b, _, _ in one.updates])
    logged = training_logs(one)[0]
    assert logged["teacher_kl"] == pytest.approx(float(kl.mean()), rel=1e-5)
    assert logged["loss"] == pytest.approx(logged["teacher_kl"], rel=1e-5)  # ratio 1: minus the mean advantage
    assert logged["tokens"] == len(kl)


def never_stops() -> Any:
    """A model whose head rules the stop token out."""
    model = make_model(0)

    def rule_out(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.index_fill(-1, torch.tensor([1]), -1e4)

    model.lm_head.register_forward_hook(rule_out)
    return model


@pytest.mark.filterwarnings("ignore:.*does more to its logits")
def test_a_teacher_that_rules_tokens_out_makes_no_nan(tmp_path: Path) -> None:
    """With kl_clip its -inf is a finite penalty; teacher_kl itself is infinite, and says so."""
    teacher = make_model(1)

    def rule_out(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.index_fill(-1, torch.arange(4, 40), -math.inf)

    teacher.lm_head.register_forward_hook(rule_out)
    one = make_trainer(tmp_path, teacher_model=teacher, kl_clip=5.0, max_steps=1)
    one.train()
    logged = training_logs(one)[0]
    assert logged["teacher_kl"] == logged["teacher_kl/p99"] == math.inf
    assert all(math.isfinite(value) for name, value in logged.items() if not name.startswith("teacher_kl"))


def test_tokens_per_second_is_of_training(tmp_path: Path) -> None:
    """Neither what happened before `train` nor evaluation is counted in."""

    def slow(trainer: Any) -> dict[str, float]:
        time.sleep(0.4)
        return {}

    one = make_trainer(tmp_path, evaluators=[slow], eval_strategy="steps", eval_steps=9, max_steps=1)
    time.sleep(0.4)
    start = time.perf_counter()
    one.train()
    seconds = time.perf_counter() - start - 0.8  # evaluations before the first step and after the last
    logged = training_logs(one)[0]
    assert logged["tokens"] / logged["tokens_per_second"] < seconds
    assert logged["time/rollout"] + logged["time/teacher"] + logged["time/train"] < seconds


# ---- The document


def documented() -> list[str]:
    """The names that docs/metrics.md explains: the first cells of its tables."""
    return re.findall(r"^\| `([^`]+)`", DOCS.read_text(), re.MULTILINE)


def test_the_document_explains_what_is_logged_and_nothing_else(run: Any) -> None:
    logged = {name for entry in training_logs(run) for name in entry} - TRAINERS_OWN
    logged = {"reward/<function>" if name.startswith("reward/") else name for name in logged}
    elsewhere = {"teacher_kl/<name>", "divergence"}  # test_mixing.py, test_dense_training.py and test_tools.py have them
    elsewhere |= {"completions/compression_ratio"}  # of texts longer than those here: test_alarms.py
    elsewhere |= {"tools/call_frequency", "tools/calling_fraction", "tools/failure_frequency"}
    assert set(documented()) - elsewhere == logged
    assert len(documented()) == len(set(documented()))
