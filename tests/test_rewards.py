"""Rewards: TRL's signature, group centring by hand, and their place beside the KL term of the advantage."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from trl_opd import kl_advantages
from trl_opd.batch import ScoredBatch
from trl_opd.rewards import compute_rewards, reward_advantages, reward_names, weighted_rewards

from .helpers import make_dataset, make_model, make_tokenizer, make_trainer, weights

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
TEXTS, IDS = ["2", "5"], [[6, 1], [9, 1]]


def column(*values: float | None) -> Tensor:
    """Rewards of one function, as `compute_rewards` gives them."""
    return torch.tensor([[math.nan if value is None else value] for value in values], dtype=torch.float64)


def advantages(
    rewards_BF: Tensor, num_generations: int, scale: str = "none", weights: list[float] | None = None
) -> list[float]:
    """`reward_advantages` as a list."""
    return reward_advantages(rewards_BF, weights or [1.0] * rewards_BF.shape[1], num_generations, scale).tolist()


# ---- Calling the functions


def test_a_function_with_kwargs_gets_prompts_completions_and_every_column() -> None:
    seen: dict[str, Any] = {}

    def reward(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [1.0, 0.0]

    rewards_BF = compute_rewards([reward], ROWS, TEXTS, IDS, trainer_state="state")
    assert seen == {
        "prompts": ["1+1=", "2+2="],
        "completions": ["2", "5"],
        "completion_ids": IDS,
        "answer": ["2", "4"],
        "trainer_state": "state",
    }
    assert rewards_BF.tolist() == [[1.0], [0.0]]
    assert rewards_BF.dtype is torch.float64


def test_a_function_gets_only_what_it_has_parameters_for() -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    def optional(completions: list[str], *, unknown: int = 3) -> list[float]:
        return [float(unknown)] * len(completions)

    assert compute_rewards([exact, optional], ROWS, TEXTS, IDS).tolist() == [[1.0, 3.0], [0.0, 3.0]]


def test_callable_objects_partials_and_their_names() -> None:
    class Length:
        """Counts characters."""

        def __call__(self, completions: list[str], **_: Any) -> list[int]:
            return [len(text) for text in completions]

    def constant(completions: list[str], value: float) -> list[float]:
        return [value] * len(completions)

    half = functools.partial(constant, value=0.5)
    assert compute_rewards([Length(), half], ROWS, TEXTS, IDS).tolist() == [[1.0, 0.5], [1.0, 0.5]]
    names = ["Length", "constant", "partial", "partial_2", "constant_2"]
    assert reward_names([Length(), constant, half, half, constant]) == names  # none hides another's figures


def test_none_means_does_not_apply() -> None:
    rewards_BF = compute_rewards([lambda **_: [None, 2.0], lambda **_: [1, True]], ROWS, TEXTS, IDS)
    assert rewards_BF[0, 0].isnan()
    assert rewards_BF[1].tolist() == [2.0, 1.0] and rewards_BF[0, 1] == 1.0


def test_completions_of_conversations_are_messages() -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], prompts: list[Any]) -> list[float]:
        seen.extend([completions, prompts])
        return [0.0, 0.0]

    conversation = [{"role": "user", "content": "2+2="}]
    compute_rewards([reward], [ROWS[0], {"prompt": conversation, "answer": "4"}], TEXTS, IDS)
    assert seen == [["2", [{"role": "assistant", "content": "5"}]], ["1+1=", conversation]]


def test_columns_that_only_later_rows_have() -> None:
    """Rows of a stream may differ; a value must not vanish because the first row lacks it."""
    seen: list[Any] = []

    def reward(completions: list[str], answer: list[str | None]) -> list[float]:
        seen.extend(answer)
        return [0.0, 0.0]

    compute_rewards([reward], [{"prompt": "1"}, {"prompt": "2", "answer": "4"}], TEXTS, IDS)
    assert seen == [None, "4"]


# ---- From rewards to advantages, by hand


def test_centred_on_the_group() -> None:
    assert advantages(column(1, 0, 2, 4), 2) == [0.5, -0.5, -1.0, 1.0]
    assert advantages(column(1, 0, 2, 5), 4) == [-1.0, -2.0, 0.0, 3.0]


def test_scaled_by_the_deviation_of_the_group() -> None:
    """Deviations 0.5 and 1."""
    expected = [0.5 / 0.5001, -0.5 / 0.5001, -1 / 1.0001, 1 / 1.0001]
    assert advantages(column(1, 0, 2, 4), 2, "group") == pytest.approx(expected)


def test_scaled_by_the_deviation_of_the_batch() -> None:
    """Of 1, 0, 2, 4 around 1.75: the root of (0.5625 + 3.0625 + 0.0625 + 5.0625) / 4 = 2.1875."""
    deviation = math.sqrt(2.1875) + 1e-4
    expected = [0.5 / deviation, -0.5 / deviation, -1 / deviation, 1 / deviation]
    assert advantages(column(1, 0, 2, 4), 2, "batch") == pytest.approx(expected)


def test_weights_of_functions() -> None:
    """2 x 1 + 0.5 x 4 = 4 against 2 x 0 + 0.5 x 0 = 0: mean 2."""
    both = torch.tensor([[1.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert advantages(both, 2, weights=[2.0, 0.5]) == [2.0, -2.0]


def test_rows_a_function_does_not_apply_to_are_left_out_of_the_mean() -> None:
    assert advantages(column(1, None, 3, None), 4) == [-1.0, 0.0, 1.0, 0.0]
    both = torch.cat([column(1, None), column(None, 3)], dim=1)  # totals 2 x 1 and 1 x 3
    assert advantages(both, 2, weights=[2.0, 1.0]) == [-0.5, 0.5]
    assert weighted_rewards(both, [2.0, 1.0]).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_any_reward_and_with_equal_rewards_give_exact_zeros(scale: str) -> None:
    assert advantages(column(None, None, 1, 1), 2, scale) == [0.0] * 4
    assert advantages(column(None, None), 2, scale) == [0.0] * 2
    assert advantages(column(1, 1, 0, 1), 2, scale)[:2] == [0.0, 0.0]


# ---- In the advantage


def some_reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards that depend on the text alone and differ within a group."""
    return [sum(map(ord, text)) % 11 / 10 for text in completions]


def scored(folder: Path, **settings: Any) -> ScoredBatch:
    """The first optimizer step's batch: two groups of four."""
    trainer = make_trainer(folder, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, **settings)
    return trainer.scored_batch([row for row in list(make_dataset(2)) for _ in range(4)])


@pytest.mark.parametrize("settings", [{}, {"kl_penalty_coef": 0.5, "kl_clip": 1.0, "kl_discount_factor": 0.9}])
def test_reward_and_kl_are_added_on_action_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The reward part is not discounted, clipped or weighted with the KL, and not repeated off the mask."""
    batch = scored(tmp_path, reward_funcs=some_reward, **settings)
    kl_BT = kl_advantages(
        batch.sampled_logps_BT,
        batch.teacher_logps_BT,
        batch.mask_BT,
        coef=settings.get("kl_penalty_coef", 1.0),
        discount=settings.get("kl_discount_factor", 0.0),
        clip=settings.get("kl_clip"),
    )
    texts = [
        str(make_tokenizer().decode(ids[mask], skip_special_tokens=True))
        for ids, mask in zip(batch.ids_BT, batch.mask_BT, strict=True)
    ]
    rewards_NG = torch.tensor(some_reward(texts)).view(2, 4)
    reward_B = (rewards_NG - rewards_NG.mean(dim=1, keepdim=True)).flatten()
    assert reward_B.view(2, 4).abs().sum(dim=1).gt(0).all(), "the example must not be trivial"
    torch.testing.assert_close(batch.reward_advantages_B, reward_B)
    torch.testing.assert_close(batch.advantages_BT, (kl_BT + reward_B[:, None]) * batch.mask_BT)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_scaling_leaves_the_kl_term_alone(tmp_path: Path, scale: str) -> None:
    plain, scaled = (scored(tmp_path, reward_funcs=some_reward, scale_rewards=s) for s in ("none", scale))
    assert not torch.allclose(plain.reward_advantages_B, scaled.reward_advantages_B)
    for batch in (plain, scaled):
        kl_BT = torch.where(batch.mask_BT, batch.teacher_logps_BT - batch.sampled_logps_BT, 0.0)
        torch.testing.assert_close((batch.advantages_BT - batch.reward_advantages_B[:, None]) * batch.mask_BT, kl_BT)


def test_equal_rewards_change_nothing(tmp_path: Path) -> None:
    """No group is filtered out: with rewards that do not differ the run is the pure distillation run, bit for bit."""

    def trained(**settings: Any) -> dict[str, Tensor]:
        trainer = make_trainer(tmp_path, num_generations=2, **settings)
        trainer.train()
        return weights(trainer.model)

    pure, equal = trained(), trained(reward_funcs=lambda completions, **_: [0.7] * len(completions))
    none = trained(reward_funcs=lambda completions, **_: [None] * len(completions))
    for name, weight in pure.items():
        assert torch.equal(weight, equal[name]) and torch.equal(weight, none[name])
    assert not torch.equal(pure["lm_head.weight"], weights(make_model(0))["lm_head.weight"])


def test_unequal_rewards_change_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_generations": 4, "max_steps": 1, "kl_penalty_coef": 0.0}
    trainer = make_trainer(tmp_path, reward_funcs=some_reward, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0.01
    idle = make_trainer(tmp_path, **settings)
    idle.train()
    assert idle.state.log_history[0]["grad_norm"] == 0.0


def test_rewards_do_not_depend_on_the_teacher(tmp_path: Path) -> None:
    one, other = (scored(tmp_path, reward_funcs=some_reward, teacher_model=make_model(seed)) for seed in (1, 2))
    assert torch.equal(one.reward_advantages_B, other.reward_advantages_B)
    assert torch.equal(one.ids_BT, other.ids_BT)
    assert not torch.equal(one.advantages_BT, other.advantages_BT)


def test_a_group_may_span_micro_batches(tmp_path: Path) -> None:
    """One group of four in micro-batches of one: centred on the whole group, so that the step is that of one batch."""

    def run(batch: int, accumulation: int) -> dict[str, float]:
        trainer = make_trainer(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_generations=4,
            reward_funcs=some_reward,
            max_steps=1,
        )
        trainer.train()
        return trainer.state.log_history[0]

    whole, cut = run(4, 1), run(1, 4)
    for name in ("loss", "grad_norm", "reward", "advantage/std"):
        assert whole[name] == pytest.approx(cut[name], rel=1e-4), name


def test_logged_rewards_are_weighted_in_sum_and_plain_by_function(tmp_path: Path) -> None:
    """`reward` is 2 x 3 + 0.5 x 1 where both apply and 2 x 3 where one does; each function's mean is over its own rows."""

    def three(completions: list[str], **_: Any) -> list[float]:
        return [3.0] * len(completions)

    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None, None, None]

    trainer = make_trainer(
        tmp_path, reward_funcs=[three, sometimes], reward_weights=[2.0, 0.5], num_generations=2, max_steps=1
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["reward"] == pytest.approx((6.5 + 3 * 6.0) / 4)
    assert (logs["reward/three"], logs["reward/sometimes"]) == (3.0, 1.0)


def test_reward_text_has_no_special_tokens_and_conversations_are_answered(tmp_path: Path) -> None:
    """Through the trainer, with a chat template."""
    seen: list[Any] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(4)])
    tokenizer = make_tokenizer(chat=True)
    make_trainer(
        tmp_path,
        train_dataset=data,
        processing_class=tokenizer,
        reward_funcs=reward,
        num_generations=4,
        per_device_train_batch_size=16,
        max_steps=1,
    ).train()
    assert any(ids[-1] == tokenizer.eos_token_id for _, ids in seen)
    for completion, ids in seen:
        assert completion == [{"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}]
        assert "<eos>" not in completion[0]["content"]
