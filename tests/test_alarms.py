"""Alarms and early stop on histories made by hand: each goes off where it should, once, and not before."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import TrainerControl, TrainerState

from trl_opd import DistillationWarning
from trl_opd.alarms import ALARMS, WINDOW, AlarmCallback, History
from trl_opd.early_stop import EarlyStopOnCollapse
from trl_opd.metrics import SHORT_TEXT, Metrics, record_texts

from .helpers import make_trainer

HEALTHY = {
    "teacher_kl": 0.5,
    "completions/truncated_fraction": 0.1,
    "completions/stopped_fraction": 0.9,
    "completions/compression_ratio": 2.0,
    "completions/mean_length": 100.0,
    "advantage/top1pct_share": 0.1,
    "ratio/mean": 1.0,
    "ratio/ess": 1.0,
    "ratio/max": 1.5,
    "sampler_kl/v2": 1e-6,
    "entropy": 1.0,
}
GOOD = {alarm.__name__: alarm for alarm in ALARMS}


def history(count: int, *, tokens_each: Any = 4000.0, **changed: Any) -> list[dict[str, float]]:
    """So many logs; what is changed is a function of the log's number, from 0, with / written as __."""
    values = {name.replace("__", "/"): value for name, value in changed.items()}
    return [
        {**HEALTHY, "tokens": tokens_each * (i + 1), **{name: value(i) for name, value in values.items()}}
        for i in range(count)
    ]


def first(alarm: Callable[[History], str | None], logs: History) -> int | None:
    """At which log it would go off first, counted from 1."""
    return next((n for n in range(1, len(logs) + 1) if alarm(logs[:n])), None)


def after(number: int, before: float, later: float) -> Callable[[int], float]:
    """`before` for so many logs, then `later`."""
    return lambda i: before if i < number else later


# ---- Each alarm


@pytest.mark.parametrize(
    ("name", "changed", "at"),
    [
        # 10 good logs, then bad ones; the mean of the last 5 passes the bound with the n-th bad one
        ("more_is_cut", {"completions__truncated_fraction": after(10, 0.1, 0.9)}, 13),  # 3/5 of 0.9 + 2/5 of 0.1 = 0.58 > 0.5
        ("no_stop", {"completions__stopped_fraction": after(10, 0.9, 0.0)}, 15),  # 1/5 of 0.9 = 0.18: not before all 5
        ("repetition", {"completions__compression_ratio": after(10, 2.0, 8.0)}, 12),  # (2 * 8 + 3 * 2) / 5 = 4.4
        ("few_tokens", {"advantage__top1pct_share": after(10, 0.1, 0.8)}, 13),  # (3 * 0.8 + 2 * 0.1) / 5 = 0.52
        ("off_policy", {"ratio__ess": after(10, 1.0, 0.1)}, 13),  # 1 - 3/5 * 0.9 = 0.46
        ("off_policy", {"ratio__mean": after(10, 1.0, 1.6)}, 12),
        ("off_policy", {"sampler_kl__v2": after(10, 0.0, 1.0)}, 11),
        ("entropy_collapse", {"entropy": after(10, 1.0, 0.01)}, 15),
    ],
)
def test_it_goes_off_where_it_should_and_the_others_do_not(
    name: str, changed: dict[str, Callable[[int], float]], at: int
) -> None:
    logs = history(30, **changed)
    assert {alarm.__name__: n for alarm in ALARMS if (n := first(alarm, logs))} == {name: at}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"completions__truncated_fraction": lambda i: 0.95},  # from the start: the first rollout has said so
        {"completions__truncated_fraction": after(10, 0.0, 0.45)},  # grown, less than half
        {"completions__stopped_fraction": lambda i: 0.0},  # it never did
        {"completions__compression_ratio": lambda i: 5.0},  # a language that compresses well
        {"completions__compression_ratio": after(10, 1.2, 2.5)},  # twice as much, as prose
        {"advantage__top1pct_share": lambda i: 0.8},  # said by the first rollout
        {"advantage__top1pct_share": after(10, 0.1, 0.8), "teacher_kl": after(5, 0.5, 0.01)},  # nearly there
        {"entropy": after(10, 1.0, 0.01), "teacher_kl": after(10, 0.5, 0.01)},  # as sharp as the teacher
        {"entropy": lambda i: 0.05},  # always was
        {"ratio__max": lambda i: 1000.0},  # a single token
    ],
)
def test_no_alarm(changed: dict[str, Callable[[int], float]]) -> None:
    assert [alarm.__name__ for alarm in ALARMS if first(alarm, history(30, **changed))] == []


def test_a_few_tokens_prove_nothing() -> None:
    assert first(GOOD["few_tokens"], history(30, tokens_each=900, advantage__top1pct_share=after(10, 0.1, 0.8))) is None


def test_no_alarm_before_there_are_two_windows_of_logs() -> None:
    worst: dict[str, Callable[[int], float]] = {
        "completions__truncated_fraction": after(1, 0.0, 1.0),
        "ratio__ess": lambda i: 0.0,
    }
    assert first(GOOD["off_policy"], history(30, **worst)) == 2 * WINDOW


def test_figures_that_are_not_logged_raise_no_alarm() -> None:
    assert [alarm([{"teacher_kl": 1.0}] * 30) for alarm in ALARMS] == [None] * len(ALARMS)


# ---- The callback


def told(callback: Any, logs: list[dict[str, Any]], state: TrainerState) -> list[tuple[int, str]]:
    """Warnings with the step at which they come."""
    found = []
    for entry in logs:
        state.global_step += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback.on_log(cast(Any, None), state, TrainerControl(), logs=entry)
        found += [(state.global_step, str(each.message)) for each in caught]
    return found


def test_each_is_told_once_by_the_main_process() -> None:
    logs: list[dict[str, Any]] = history(30, ratio__ess=after(10, 1.0, 0.1), completions__stopped_fraction=after(10, 0.9, 0.0))
    logs.insert(3, {"eval_teacher_kl": 9.0})  # an evaluation is no log of training
    callback, state = AlarmCallback(), TrainerState(is_world_process_zero=True)
    callback.on_train_begin(cast(Any, None), state, TrainerControl())
    assert [step for step, _ in told(callback, logs, state)] == [14, 16]
    other = TrainerState(is_world_process_zero=False)
    callback.on_train_begin(cast(Any, None), other, TrainerControl())
    assert told(callback, logs, other) == []


def test_a_resumed_run_knows_what_was_logged_before() -> None:
    logs: list[dict[str, Any]] = history(20, ratio__ess=after(10, 1.0, 0.1))
    callback = AlarmCallback()
    state = TrainerState(is_world_process_zero=True, log_history=[*logs[:12], {"eval_teacher_kl": 1.0}])
    callback.on_train_begin(cast(Any, None), state, TrainerControl())
    ((step, message),) = told(callback, logs[12:], state)
    assert step == 1 and "ratio/ess 0.46" in message


def test_the_trainer_has_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, AlarmCallback)]
    assert len(callback.history) == 1


# ---- The compression ratio


def test_compression_ratio_by_hand() -> None:
    """Bytes, not characters; each text alone; short ones do not count."""
    texts = ["é" * SHORT_TEXT, "".join(random.Random(0).choices("abcdefgh", k=200)), "a" * (SHORT_TEXT - 1), ""]
    metrics = Metrics()
    record_texts(metrics, texts)
    raw, packed = 2 * SHORT_TEXT + 200, sum(len(zlib.compress(text.encode())) for text in texts[:2])
    assert metrics.reduce()["completions/compression_ratio"] == pytest.approx(raw / packed)
    record_texts(metrics, ["too short"])
    assert "completions/compression_ratio" not in metrics.reduce()


@pytest.mark.filterwarnings("ignore:.*(guessing|were cut|repeat themselves)")  # it was never trained
def test_texts_of_training_are_measured(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, max_completion_length=100)
    seen: list[Any] = []
    decode = trainer.processing_class.batch_decode
    trainer.processing_class.batch_decode = lambda ids, **more: seen.append(decode(ids, **more)) or seen[-1]
    trainer.train()
    texts = [text.encode() for text in seen[0] if len(text) >= SHORT_TEXT]
    assert texts
    expected = sum(map(len, texts)) / sum(len(zlib.compress(text)) for text in texts)
    (logged,) = [e["completions/compression_ratio"] for e in trainer.state.log_history if "teacher_kl" in e]
    assert logged == pytest.approx(expected)


# ---- Early stop


def stopped(callback: EarlyStopOnCollapse, logs: list[dict[str, Any]]) -> int | None:
    """The log after which training ends, from 1, with a checkpoint and a reason."""
    state = TrainerState(is_world_process_zero=False)
    callback.on_train_begin(cast(Any, None), state, TrainerControl())
    for number, entry in enumerate(logs, start=1):
        control = TrainerControl()
        callback.on_log(cast(Any, None), state, control, logs=entry)
        assert control.should_training_stop == control.should_save
        if control.should_training_stop:
            assert callback.reason
            return number
    return None


@pytest.mark.parametrize(
    ("kl", "at"),
    [
        (after(20, 0.5, 0.5), None),
        (lambda i: 1.0 - 0.03 * i, None),
        (after(20, 0.5, 3.0), 22),  # (2 * 3.0 + 3 * 0.5) / 5 = 1.5: three times the lowest, after 20 and two
        (after(20, 0.02, 0.08), None),  # four times as much, but 0.06 nats
        (after(20, 0.5, float("nan")), 21),
        (after(20, 0.5, float("inf")), 21),
    ],
)
def test_early_stop_on_a_kl_that_rises_again(kl: Callable[[int], float], at: int | None) -> None:
    callback = EarlyStopOnCollapse()
    assert stopped(callback, cast(Any, history(30, teacher_kl=kl))) == at
    assert at != 21 or f"teacher_kl is {kl(20)}." in str(callback.reason)


def test_early_stop_on_completions_that_become_short() -> None:
    logs: list[dict[str, Any]] = history(30, completions__mean_length=after(20, 100.0, 1.0))
    assert stopped(EarlyStopOnCollapse(), logs) == 25  # 1/5 of 100 is still above a tenth
    assert stopped(EarlyStopOnCollapse(min_length_share=0.5), logs) == 23
    assert stopped(EarlyStopOnCollapse(min_length_share=0.0), logs) is None


def test_early_stop_reads_the_logs_of_other_trainers() -> None:
    logs = [{"kl": 0.1 if i < 10 else 5.0, "loss": 0.0} for i in range(20)]
    assert stopped(EarlyStopOnCollapse(kl="kl"), cast(Any, logs)) == 11
    assert stopped(EarlyStopOnCollapse(), cast(Any, logs)) is None


def test_early_stop_goes_on_from_what_was_logged_before_a_checkpoint() -> None:
    callback, logs = EarlyStopOnCollapse(), history(12, teacher_kl=after(10, 0.5, 5.0))
    state = TrainerState(log_history=cast(Any, logs[:10]))
    callback.on_train_begin(cast(Any, None), state, TrainerControl())
    with pytest.warns(DistillationWarning, match="has risen to 1.4 nats"):
        callback.on_log(cast(Any, None), state, control := TrainerControl(), logs=cast(Any, logs[10]))
    assert control.should_training_stop


def test_early_stop_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The reason is told as a warning."""
    callback = EarlyStopOnCollapse(min_length_share=0.9, window=1)
    callback.shrinking = lambda lengths: "short" if len(lengths) == 2 else None  # type: ignore[method-assign]
    trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=5)
    with pytest.warns(DistillationWarning, match="Training ends after step 2: short"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("settings", [{"max_kl_rise": 1.0}, {"min_length_share": 1.0}, {"window": 0}])
def test_early_stop_with_bounds_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EarlyStopOnCollapse(**settings)
