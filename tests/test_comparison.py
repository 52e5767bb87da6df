"""What is said of student and teacher after the first rollout: each mistake by its own words, nothing where all is well."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from trl_opd import Completion, Rollout
from trl_opd.comparison import EVIDENCE, compare

from .helpers import make_dataset, make_model, make_trainer

V = 1000
LENGTH = 40


def written(stopped: list[bool] | None = None, ids: list[list[int]] | None = None) -> Rollout:
    """Eight completions, of which half are cut at 40 tokens; each token had log-prob -1."""
    generator = torch.Generator().manual_seed(0)
    stopped = stopped or [i % 2 == 0 for i in range(8)]
    ids = ids or [
        torch.randint(5, V, (LENGTH if not s else 10 + i,), generator=generator).tolist() for i, s in enumerate(stopped)
    ]
    completions = [Completion(ids=row, logps=[-1.0] * len(row), stopped=stop) for row, stop in zip(ids, stopped, strict=True)]
    prompts = [[2] * (3 + i) for i in range(len(ids))]
    return Rollout.build(prompts, completions, [{"prompt": "x"}] * len(ids), pad_id=0, device=torch.device("cpu"))


def scored(rollout: Rollout, *, first: float = -1.5, stop: float = -1.5, inner: float = -1.5) -> Tensor:
    """(B, T) teacher log-probs: one for each first token, one for each stop token, one for all others; NaN off the mask."""
    logps_BT = torch.where(rollout.mask_BT, inner, torch.nan)
    for row, (start, length) in enumerate(zip(rollout.prompt_lengths_B, rollout.completion_lengths_B, strict=True)):
        logps_BT[row, start] = first
        if rollout.stopped_B[row]:
            logps_BT[row, start + length - 1] = stop
    return logps_BT


def told(rollout: Rollout, teacher_logps_BT: Tensor) -> list[str]:
    comparison = compare(rollout, teacher_logps_BT, V)
    return comparison.verdicts(LENGTH, half_precision=False)


def test_figures_by_hand() -> None:
    rollout = written(stopped=[True, True, False, False], ids=[[7, 8, 9, 1], [7, 1], [3] * 40, [*range(40)]])
    found = compare(rollout, scored(rollout, first=-4.0, stop=-3.0, inner=-2.0), V)
    tokens = 4 + 2 + 40 + 40
    assert (found.completions, found.tokens, found.vocab_size) == (4, tokens, V)
    assert (found.first_kl, found.stop_kl, found.inner_kl) == (3.0, 2.0, 1.0)
    assert (found.first_teacher_logp, found.stop_teacher_logp) == (-4.0, -3.0)
    assert found.teacher_kl == pytest.approx((4 * 3 + 2 * 2 + (tokens - 6) * 1) / tokens)
    assert found.teacher_logp == pytest.approx(-(4 * 4 + 2 * 3 + (tokens - 6) * 2) / tokens)
    assert (found.truncated_fraction, found.repeated_fraction) == (0.5, 0.25)
    assert found.top1pct_share == pytest.approx(3 / (tokens * found.teacher_kl))  # one token of 86


def test_nothing_is_said_where_all_is_well() -> None:
    rollout = written()
    assert told(rollout, scored(rollout)) == []


def test_a_teacher_that_disagrees_everywhere_is_no_mistake_of_the_template() -> None:
    rollout = written()
    assert told(rollout, scored(rollout, first=-6.0, stop=-6.0, inner=-5.0)) == []


ROLLOUT = written()
CUT = written(stopped=[False] * 6 + [True] * 2)
LOOPING = written(stopped=[False] * 8, ids=[[5, 6, 7] * 13 + [5]] * 8)
LONG = written(stopped=[True] * 40)
SPIKES = scored(LONG)
SPIKES[:6, 10] = -500.0


@pytest.mark.parametrize(
    ("rollout", "teacher_logps_BT", "words"),
    [
        (ROLLOUT, scored(ROLLOUT, first=-1.0, stop=-1.0, inner=-1.0), ["the teacher scores as the student does"]),
        (
            ROLLOUT,
            scored(ROLLOUT, first=-14.0),
            ["first token", "log-prob of -14.0", "13.0 nats less", "chat template differs"],
        ),
        (ROLLOUT, scored(ROLLOUT, stop=-12.0), ["stop token a log-prob of -12.0", "never to stop", "eos_token"]),
        (CUT, scored(CUT), ["75% of the completions were cut at 40", "Raise max_completion_length"]),
        (LOOPING, scored(LOOPING), ["100% of the completions repeat themselves", "A longer limit would not help"]),
        (LONG, SPIKES, ["A hundredth of the tokens carries", "kl_clip"]),
        (ROLLOUT, scored(ROLLOUT, first=-6.9, stop=-6.9, inner=-6.9), ["no better than guessing among 1000 ids", "-6.9"]),
    ],
    ids=["same", "template", "stop", "cut", "repetition", "few tokens", "guessing"],
)
def test_each_mistake_is_told_by_its_own_words(rollout: Rollout, teacher_logps_BT: Tensor, words: list[str]) -> None:
    (verdict,) = told(rollout, teacher_logps_BT)
    for word in words:
        assert word in verdict


def test_few_tokens_prove_nothing_but_that_the_two_are_the_same() -> None:
    rollout = written(stopped=[False] * 2, ids=[[7] * (EVIDENCE // 2 - 1)] * 2)
    assert told(rollout, scored(rollout, inner=-30.0)) == []
    (verdict,) = told(rollout, rollout.sampled_logps_BT)
    assert "the teacher scores as the student does" in verdict


def test_no_token_to_learn_from_says_nothing() -> None:
    rollout = written()
    masked = replace(rollout, mask_BT=torch.zeros_like(rollout.mask_BT))
    assert told(masked, scored(rollout)) == []


def test_rounding_of_half_precision_counts_as_the_same() -> None:
    rollout = written()
    comparison = compare(rollout, rollout.sampled_logps_BT - 0.02, V)
    assert comparison.verdicts(LENGTH, half_precision=False) == []
    assert len(comparison.verdicts(LENGTH, half_precision=True)) == 1


def test_a_run_warns_once_before_its_first_update(tmp_path: Any) -> None:
    """A teacher whose head was never trained."""
    teacher = make_model(1)
    torch.nn.init.zeros_(cast(Any, teacher).lm_head.weight)
    settings = {"train_dataset": make_dataset(64), "per_device_train_batch_size": 64, "max_steps": 3}
    trainer = make_trainer(tmp_path, teacher_model=teacher, **settings)
    with pytest.warns(UserWarning, match="no better than guessing among 43 ids") as caught:
        trainer.train()
    said = [str(warning.message) for warning in caught]
    assert len([text for text in said if "guessing" in text]) == 1
    assert not [text for text in said if "chat template differs" in text]
    assert -math.log(43) == pytest.approx(-3.8, abs=0.05)
