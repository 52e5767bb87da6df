"""The advantage, worked by hand: the rows below are small enough to check each number against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trl_opd.advantage import kl_advantages, reverse_kl

NAN, INF = math.nan, math.inf

SAMPLED = [[0.0, -1.0, -0.5, -2.0], [0.0, -0.25, -3.0, -1.0]]
TEACHER = [[0.0, -3.0, -0.25, -2.0], [0.0, -0.25, -1.0, -6.0]]
"""d = s - log q on the action tokens below: [2, -0.25, 0] and [0, -2]."""
MASK = [[0, 1, 1, 1], [0, 1, 1, 0]]


def f64(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def rows(
    sampled: list[list[float]] = SAMPLED, teacher: list[list[float]] = TEACHER, mask: list[list[int]] = MASK
) -> tuple[Tensor, Tensor, Tensor]:
    return f64(sampled), f64(teacher), torch.tensor(mask)


def advantages_of(
    values: list[list[float]], mask: list[list[int]], *, discount: float = 0.0, clip: float | None = None
) -> list[list[float]]:
    """Advantages of tokens whose `a_t` (that is, -d_t) are `values`."""
    advantages = kl_advantages(torch.zeros_like(f64(values)), f64(values), torch.tensor(mask), discount=discount, clip=clip)
    return advantages.tolist()


# ---- a_t = -coef * clamp(s_t - log q_t) on action tokens


def test_the_advantage_is_the_negative_reverse_kl_of_each_action_token() -> None:
    assert kl_advantages(*rows()).tolist() == [[0, -2, 0.25, 0], [0, 0, 2, 0]]


def test_a_token_the_teacher_likes_better_than_the_student_is_encouraged() -> None:
    assert float(kl_advantages(f64([[-3.0]]), f64([[-1.0]]), torch.ones(1, 1))) == 2.0


def test_coef_scales() -> None:
    assert kl_advantages(*rows(), coef=0.5).tolist() == [[0, -1, 0.125, 0], [0, 0, 1, 0]]


def test_coef_zero_leaves_nothing_of_the_teacher() -> None:
    assert kl_advantages(*rows(), coef=0.0, discount=0.9).abs().max() == 0


def test_the_clip_bounds_both_signs() -> None:
    assert kl_advantages(*rows(), clip=1.0).tolist() == [[0, -1, 0.25, 0], [0, 0, 1, 0]]


def test_the_clip_is_in_nats_and_comes_before_coef() -> None:
    assert kl_advantages(*rows(), coef=10.0, clip=1.0).tolist() == [[0, -10, 2.5, 0], [0, 0, 10, 0]]


def test_a_clip_makes_a_penalty_of_a_token_the_teacher_rules_out() -> None:
    sampled, teacher = f64([[-1.0, -1.0]]), f64([[-INF, -2.0]])
    assert kl_advantages(sampled, teacher, torch.ones(1, 2), clip=5.0).tolist() == [[-5, -1]]
    assert kl_advantages(sampled, teacher, torch.ones(1, 2), clip=5.0, discount=1.0).tolist() == [[-6, -1]]


def test_the_kl_is_neither_centred_nor_whitened() -> None:
    """A row has the advantages it has alone, and a constant gap stays a constant."""
    sampled, teacher, mask = rows()
    alone = [kl_advantages(sampled[i : i + 1], teacher[i : i + 1], mask[i : i + 1], discount=0.5) for i in range(2)]
    assert torch.equal(torch.cat(alone), kl_advantages(sampled, teacher, mask, discount=0.5))
    assert kl_advantages(sampled, sampled - 1.0, mask).tolist() == [[0, -1, -1, -1], [0, -1, -1, 0]]


def test_equal_policies_have_no_advantage_on_any_token() -> None:
    sampled, _, mask = rows()
    for discount in (0.0, 0.5, 1.0):
        assert kl_advantages(sampled, sampled.clone(), mask, discount=discount).abs().max() == 0


# ---- R_t = a_t + discount * R_next(t)


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(0.0, [0, -1, 2, -4]), (0.5, [0, -1, 0, -4]), (1.0, [0, -3, -2, -4]), (0.9, [0, -1 + 0.9 * (2 - 3.6), 2 - 3.6, -4])],
)
def test_a_token_answers_for_the_later_ones(discount: float, expected: list[float]) -> None:
    values = [[9.0, -1.0, 2.0, -4.0]]
    assert advantages_of(values, [[0, 1, 1, 1]], discount=discount)[0] == pytest.approx(expected, abs=1e-15)


def test_the_discount_skips_gaps_and_puts_nothing_in_them() -> None:
    """Tool output between two action tokens is no step of the sum: it is not counted, discounted or given a value."""
    values = [[7.0, 1.0, 7.0, 7.0, 2.0, 4.0, 7.0]]
    mask = [[0, 1, 0, 0, 1, 1, 0]]
    assert advantages_of(values, mask, discount=0.5) == [[0, 3, 0, 0, 4, 4, 0]]
    assert advantages_of([[1.0, 2.0, 4.0]], [[1, 1, 1]], discount=0.5) == [[3, 4, 4]]


def test_the_clip_is_on_each_token_not_on_the_sum() -> None:
    assert advantages_of([[3.0, 3.0, -0.5]], [[1, 1, 1]], discount=1.0, clip=1.0) == [[1.5, 0.5, -0.5]]


def test_the_discounted_sum_by_a_second_route() -> None:
    """Random masks: sum_j discount^(steps from t to j) * a_j over the action tokens j from t on, one pair at a time."""
    torch.manual_seed(0)
    values, mask = torch.randn(20, 9, dtype=torch.float64), torch.rand(20, 9) < 0.6
    expected = torch.zeros_like(values)
    for row in range(20):
        actions = mask[row].nonzero().flatten().tolist()
        for rank, t in enumerate(actions):
            expected[row, t] = sum(0.7**steps * values[row, j] for steps, j in enumerate(actions[rank:]))
    found = kl_advantages(torch.zeros_like(values), values, mask, discount=0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found[~mask].abs().max() == 0


def test_padding_between_rows_of_unequal_length_changes_nothing() -> None:
    one, three = [[-1.0]], [[-1.0, 2.0, -4.0]]
    together = advantages_of([[-1.0, 5.0, 5.0], *three], [[1, 0, 0], [1, 1, 1]], discount=0.9)
    assert together[0] == [*advantages_of(one, [[1]], discount=0.9)[0], 0, 0]
    assert together[1] == advantages_of(three, [[1, 1, 1]], discount=0.9)[0]


# ---- Masks


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("discount", [0.0, 0.9])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_stands_off_the_mask_is_ignored(junk: float, discount: float, clip: float | None) -> None:
    sampled, teacher, _ = rows()
    mask = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0]])
    expected = kl_advantages(sampled, teacher, mask, discount=discount, clip=clip)
    for spoil_sampled, spoil_teacher in ((True, False), (False, True), (True, True)):
        s = torch.where(mask.bool(), sampled, junk) if spoil_sampled else sampled
        q = torch.where(mask.bool(), teacher, junk) if spoil_teacher else teacher
        found = kl_advantages(s, q, mask, discount=discount, clip=clip)
        assert torch.equal(found, expected)
        assert found[~mask.bool()].abs().max() == 0


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_a_row_without_action_tokens_is_zero(discount: float) -> None:
    assert advantages_of([[NAN, NAN], [1.0, 2.0]], [[0, 0], [0, 1]], discount=discount) == [[0, 0], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.float64])
def test_the_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    sampled, teacher, mask = rows()
    assert torch.equal(
        kl_advantages(sampled, teacher, mask.to(dtype), discount=0.5), kl_advantages(sampled, teacher, mask, discount=0.5)
    )


# ---- A constant to the gradient, and nothing else touched


def test_advantages_are_detached() -> None:
    sampled, teacher, mask = rows()
    for discount in (0.0, 1.0):
        advantages = kl_advantages(sampled.requires_grad_(), teacher.requires_grad_(), mask, discount=discount)
        assert not advantages.requires_grad
    assert not reverse_kl(sampled, teacher, mask).requires_grad


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_inputs_are_left_as_they_were(discount: float) -> None:
    inputs = rows()
    copies = [tensor.clone() for tensor in inputs]
    kl_advantages(*inputs, discount=discount, clip=0.1)
    assert all(torch.equal(one, other) for one, other in zip(inputs, copies, strict=True))


def test_half_precision_teacher_scores_do_not_round_the_students() -> None:
    sampled = torch.tensor([[-1.001953125]], dtype=torch.float32)  # not a bf16 number
    advantages = kl_advantages(sampled, torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.ones(1, 1))
    assert advantages.dtype == torch.float32
    assert advantages.item() == 0.001953125


def test_reverse_kl_is_the_sampled_estimate_on_action_tokens() -> None:
    assert reverse_kl(*rows()).tolist() == [[0, 2, -0.25, 0], [0, 0, -2, 0]]
