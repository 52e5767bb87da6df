"""The policy losses, worked by hand: value and gradient of each, its reductions, its sums for metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_opd.loss import LOSS_FN_DEFAULTS, REDUCTIONS, count_items, loss_settings, policy_loss

LOSSES = tuple(LOSS_FN_DEFAULTS)
LN2 = math.log(2)


def f64(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_token(ratio: float, advantage: float, loss_fn: str, *, logp: float = -1.5, **config: float) -> tuple[float, float]:
    """Loss of a single token and its gradient with respect to the token's log-prob."""
    logps = f64([[logp]]).requires_grad_()
    sampled = f64([[logp - math.log(ratio)]])
    loss, _ = policy_loss(logps, sampled, f64([[advantage]]), torch.ones(1, 1), loss_fn=loss_fn, loss_fn_config=config)
    loss.backward()
    assert logps.grad is not None
    return loss.item(), logps.grad.item()


def batch(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ragged rows (action tokens at the head of each, with a gap in the longer ones) with ratios on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)
    logps, noise, advantages = (
        torch.randn(len(lengths), max(lengths), generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logps = -logps.abs()
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    if max(lengths) > 2:
        mask[:, 1] &= torch.tensor(lengths) < 5  # a gap, but not where it would leave a row empty
    return logps, logps + 0.5 * noise, advantages, mask


# ---- Each loss by hand


@pytest.mark.parametrize(("ratio", "advantage"), [(1.0, 3.0), (2.0, 3.0), (0.25, 3.0), (2.0, -3.0), (0.25, -3.0), (2.0, 0.0)])
def test_importance_sampling(ratio: float, advantage: float) -> None:
    """-r·A, and d r / d logp = r."""
    assert one_token(ratio, advantage, "importance_sampling") == pytest.approx((-ratio * advantage, -ratio * advantage))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.1, 1.0, -1.1, -1.1),
        (0.9, -1.0, 0.9, 0.9),
        (2.0, 1.0, -1.2, 0.0),  # above the upper bound with A > 0: clipped, no gradient
        (2.0, -1.0, 2.0, 2.0),  # above it with A < 0: the way back stays open
        (0.5, 1.0, -0.5, -0.5),  # below the lower bound with A > 0: the way back
        (0.5, -1.0, 0.8, 0.0),  # below it with A < 0: clipped
    ],
)
def test_ppo(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    """-min(r·A, clip(r, 0.8, 1.2)·A)."""
    assert one_token(ratio, advantage, "ppo") == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(2.0, 1.0, -1.8, 0.0), (0.5, -1.0, 0.6, 0.0), (1.7, 1.0, -1.7, -1.7), (0.7, -1.0, 0.7, 0.7)],
)
def test_ppo_thresholds_are_bounds_of_the_ratio(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found = one_token(ratio, advantage, "ppo", clip_low_threshold=0.6, clip_high_threshold=1.8)
    assert found == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.0, 2.0, 1.0), (3.0, 2.0, 3.0), (8.0, 2.0, 4.0), (8.0, -2.0, 4.0), (0.01, 2.0, 0.01)]
)
def test_cispo(ratio: float, advantage: float, weight: float) -> None:
    """-sg[clip(r, 0, 4)]·logp·A: a clipped token keeps its gradient, with a bounded weight that has none itself."""
    loss, gradient = one_token(ratio, advantage, "cispo", logp=-1.5)
    assert (loss, gradient) == pytest.approx((1.5 * weight * advantage, -weight * advantage))


def test_cispo_thresholds() -> None:
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    assert one_token(0.1, 3.0, "cispo", logp=-2.0, **config) == pytest.approx((3.0, -1.5))
    assert one_token(9.0, 3.0, "cispo", logp=-2.0, **config) == pytest.approx((12.0, -6.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "beta"), [(1.0, 2.0, 0.05), (2.0, 2.0, 0.05), (0.5, -2.0, 0.05), (4.0, 1.0, 3.0)]
)
def test_dro(ratio: float, advantage: float, beta: float) -> None:
    """-(logp·A - ½·beta·(logp - s)²); beta is 0.05 unless it is given."""
    config = {} if beta == 0.05 else {"beta": beta}
    loss, gradient = one_token(ratio, advantage, "dro", logp=-1.5, **config)
    log_ratio = math.log(ratio)
    assert loss == pytest.approx(1.5 * advantage + 0.5 * beta * log_ratio**2)
    assert gradient == pytest.approx(-advantage + beta * log_ratio)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(loss_fn: str) -> None:
    assert one_token(1.0, 0.7, loss_fn)[1] == pytest.approx(-0.7)


def test_the_default_is_importance_sampling_by_token_mean() -> None:
    logps, sampled, advantages, mask = batch(0, [4, 2])
    loss, stats = policy_loss(logps, sampled, advantages, mask)
    assert loss.item() == pytest.approx(-(((logps - sampled).exp() * advantages)[mask].mean().item()))
    assert set(stats) == {"ratio/mean", "ratio/square", "sampler_kl/v1", "sampler_kl/v2"}


# ---- Settings


def test_defaults_are_those_of_the_table() -> None:
    assert loss_settings("importance_sampling", None) == {}
    assert loss_settings("ppo", {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_settings("cispo", None) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert loss_settings("dro", None) == {"beta": 0.05}


def test_one_override_leaves_the_other_default() -> None:
    assert loss_settings("ppo", {"clip_high_threshold": 1.5}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    assert LOSS_FN_DEFAULTS["ppo"]["clip_high_threshold"] == 1.2


@pytest.mark.parametrize(
    ("loss_fn", "config", "mentions"),
    [
        ("grpo", None, ["grpo", "importance_sampling", "ppo", "cispo", "dro"]),
        ("ppo", {"epsilon": 0.2}, ["epsilon", "ppo", "clip_low_threshold", "clip_high_threshold"]),
        ("dro", {"clip_low_threshold": 0.2}, ["clip_low_threshold", "beta"]),
        ("importance_sampling", {"beta": 0.2}, ["beta", "importance_sampling", "none at all"]),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(loss_fn: str, config: dict[str, Any] | None, mentions: list[str]) -> None:
    tokens = f64([[-1.0]])
    with pytest.raises(ValueError) as error:
        policy_loss(tokens, tokens, tokens, torch.ones(1, 1), loss_fn=loss_fn, loss_fn_config=config)
    assert all(word in str(error.value) for word in mentions)


def test_an_unknown_reduction_lists_the_valid_ones() -> None:
    tokens = f64([[-1.0]])
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean, sum"):
        policy_loss(tokens, tokens, tokens, torch.ones(1, 1), reduction="mean")
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, sequence_mean, sum"):
        count_items(torch.ones(1, 1), "mean")


@pytest.mark.parametrize("which", range(4))
def test_tensors_that_would_broadcast_are_refused(which: int) -> None:
    tensors = [torch.zeros(2, 3) for _ in range(4)]
    tensors[which] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"one shape.*\(2, 3\)"):
        policy_loss(*tensors)


# ---- Reductions


# Per-token losses 1, 2, 3 and 10 (r = 1, A = -loss), the rows' means 2 and 10
RAGGED = (f64([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]), f64([[-1.0, -2.0, -3.0], [-10.0, 0.0, 0.0]]))
RAGGED_MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("reduction", "num_items", "expected"), [("token_mean", 4, 4.0), ("sequence_mean", 2, 6.0), ("sum", 1, 16.0)]
)
def test_reductions(reduction: str, num_items: int, expected: float) -> None:
    logps, advantages = RAGGED

    def loss(items: Any) -> float:
        return policy_loss(logps, logps, advantages, RAGGED_MASK, reduction=reduction, num_items=items)[0].item()

    assert loss(None) == pytest.approx(expected)
    assert count_items(RAGGED_MASK, reduction).item() == num_items
    for items in (num_items, float(num_items), torch.tensor(num_items)):
        assert loss(items) == pytest.approx(expected)
    assert loss(10 * num_items) == pytest.approx(expected if reduction == "sum" else expected / 10)


def test_a_sequence_counts_if_it_has_an_action_token() -> None:
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert [count_items(mask, reduction).item() for reduction in REDUCTIONS] == [6, 2, 1]


def step_gradient(parts: list[list[int]], tensors: tuple[Tensor, ...], **settings: Any) -> tuple[float, Tensor]:
    """Loss and gradient of a step whose rows come in `parts`, each cut to its own longest row."""
    logps, sampled, advantages, mask = tensors
    logps = logps.clone().requires_grad_()
    items = count_items(mask, settings["reduction"])
    total = 0.0
    for part in parts:
        width = max(1, int(mask[part].nonzero()[:, 1].max()) + 1 if mask[part].any() else 1)
        inputs = [tensor[part][:, :width] for tensor in (logps, sampled, advantages, mask)]
        loss, _ = policy_loss(*inputs, num_items=items, **settings)
        loss.backward()
        total += loss.item()
    assert logps.grad is not None
    return total, logps.grad


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(loss_fn: str, reduction: str) -> None:
    """Rows of 3 and 300 tokens, one without any, and some between: as one batch, each alone, and in unequal parts."""
    logps, sampled, advantages, mask = batch(1, [3, 300, 4, 17, 120])
    mask[3] = False
    tensors = (logps, sampled, advantages, mask)
    whole, gradient = step_gradient([[0, 1, 2, 3, 4]], tensors, loss_fn=loss_fn, reduction=reduction)
    assert gradient[mask].abs().min() > 0 or loss_fn == "ppo"
    for parts in ([[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[4, 2], [3], [1, 0]]):
        loss, other = step_gradient(parts, tensors, loss_fn=loss_fn, reduction=reduction)
        assert loss == pytest.approx(whole, abs=1e-12)
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-14)


def test_a_mean_of_means_would_be_another_gradient() -> None:
    """The guard of the test above: averaging the means of a 3- and a 300-token micro-batch weighs tokens a hundredfold."""
    logps, sampled, advantages, mask = batch(1, [3, 300])
    _, gradient = step_gradient([[0], [1]], (logps, sampled, advantages, mask), reduction="token_mean")
    means = logps.clone().requires_grad_()
    for row in range(2):
        (
            policy_loss(means[row : row + 1], sampled[row : row + 1], advantages[row : row + 1], mask[row : row + 1])[0] / 2
        ).backward()
    assert means.grad is not None
    assert (means.grad[0] / gradient[0])[mask[0]].mean() > 40


# ---- Masks


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_stands_off_the_mask_reaches_neither_loss_nor_gradient_nor_sums(
    junk: float, loss_fn: str, reduction: str
) -> None:
    *tensors, mask = batch(2, [3, 6, 1])
    mask[0, 1] = False
    runs = []
    for spoiled in [(), (0,), (1,), (2,), (0, 1, 2)]:
        inputs = [torch.where(mask, t, junk) if i in spoiled else t for i, t in enumerate(tensors)]
        logps = inputs[0].clone().requires_grad_()
        loss, stats = policy_loss(logps, *inputs[1:], mask=mask, loss_fn=loss_fn, reduction=reduction)
        loss.backward()
        assert logps.grad is not None
        assert logps.grad[~mask].abs().max() == 0
        runs.append((loss, logps.grad, stats))
    for loss, gradient, stats in runs[1:]:
        assert torch.equal(loss, runs[0][0])
        assert torch.equal(gradient, runs[0][1])
        assert all(torch.equal(total, runs[0][2][name][0]) for name, (total, _) in stats.items())


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_items", [None, 0, 7])
def test_a_micro_batch_without_action_tokens_is_a_finite_zero(loss_fn: str, reduction: str, num_items: int | None) -> None:
    """It still has a graph, so that every process takes part in the backward pass."""
    *tensors, mask = batch(3, [3, 2])
    logps = tensors[0].requires_grad_()
    items = None if num_items is None else torch.tensor(num_items)
    loss, stats = policy_loss(
        logps, *tensors[1:], mask=torch.zeros_like(mask), loss_fn=loss_fn, reduction=reduction, num_items=items
    )
    loss.backward()
    assert loss.item() == 0
    assert logps.grad is not None
    assert logps.grad.abs().max() == 0
    assert all(total == 0 and count == 0 for total, count in stats.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_the_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    *tensors, mask = batch(4, [3, 6])
    for reduction in REDUCTIONS:
        loss, _ = policy_loss(*tensors, mask=mask.to(dtype), reduction=reduction)
        assert torch.equal(loss, policy_loss(*tensors, mask=mask, reduction=reduction)[0])


# ---- What is constant


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradients_flow_through_the_current_log_probs_only(loss_fn: str) -> None:
    logps, sampled, advantages, mask = batch(5, [3, 6])
    for tensor in (logps, sampled, advantages):
        tensor.requires_grad_()
    loss, stats = policy_loss(logps, sampled, advantages, mask, loss_fn=loss_fn)
    loss.backward()
    assert logps.grad is not None
    assert sampled.grad is None
    assert advantages.grad is None
    assert not any(total.requires_grad for total, _ in stats.values())


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_inputs_are_left_as_they_were(loss_fn: str) -> None:
    inputs = batch(6, [3, 6])
    copies = [tensor.clone() for tensor in inputs]
    policy_loss(*inputs, loss_fn=loss_fn)
    assert all(torch.equal(one, other) for one, other in zip(inputs, copies, strict=True))


# ---- Sums for metrics


def test_sums_by_hand() -> None:
    """Ratios 2, 1/2 and 1 on three action tokens; a fourth position is masked."""
    sampled = f64([[-2.0, -2.0, -2.0, -2.0]])
    logps = sampled + f64([[LN2, -LN2, 0.0, 5.0]])
    _, stats = policy_loss(logps, sampled, f64([[1.0, 1.0, 1.0, 1.0]]), torch.tensor([[1, 1, 1, 0]]))
    found = {name: (total.item(), count.item()) for name, (total, count) in stats.items()}
    assert found["ratio/mean"] == pytest.approx((3.5, 3))
    assert found["ratio/square"] == pytest.approx((5.25, 3))
    assert found["sampler_kl/v1"] == pytest.approx((0.0, 3))
    assert found["sampler_kl/v2"] == pytest.approx((LN2**2, 3))


def test_sampler_kl_v1_is_sampled_minus_current() -> None:
    _, stats = policy_loss(f64([[-3.0]]), f64([[-1.0]]), f64([[1.0]]), torch.ones(1, 1))
    assert stats["sampler_kl/v1"][0].item() == 2.0
    assert stats["sampler_kl/v2"][0].item() == 2.0


@pytest.mark.parametrize(
    ("loss_fn", "clipped"),
    [("ppo", 2), ("cispo", 3)],  # ppo: only where the bound takes effect; cispo: wherever the weight is not the ratio
)
def test_clip_fraction_counts_clipped_tokens(loss_fn: str, clipped: int) -> None:
    ratios, advantages = f64([[2.0, 2.0, 0.5, 1.0, 9.0]]), f64([[1.0, -1.0, -1.0, 1.0, 1.0]])
    logps = f64([[-1.0] * 5])
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    _, stats = policy_loss(logps, logps - ratios.log(), advantages, mask, loss_fn=loss_fn, loss_fn_config=config)
    assert tuple(value.item() for value in stats["clip_fraction"]) == (clipped, 4)


def test_losses_that_do_not_clip_have_no_clip_fraction() -> None:
    for loss_fn in ("importance_sampling", "dro"):
        assert "clip_fraction" not in policy_loss(*batch(7, [2, 3]), loss_fn=loss_fn)[1]
