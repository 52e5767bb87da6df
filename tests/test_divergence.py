"""Divergences between two rows of logits and their derivatives: against autograd, torch, TRL, and where numbers end."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trl_opd.divergence import DIRECTIONS, Compared, Divergence, check_divergence, compare_

BETAS = (0.1, 0.5, 0.8)
ALL = [
    *(Divergence("full", direction) for direction in ("reverse", "forward")),
    *(Divergence("topk", direction, top_k=k) for direction in ("reverse", "forward") for k in (1, 2)),
    *(Divergence("full", "jsd", beta) for beta in BETAS),
    *(Divergence("topk", "jsd", beta, k) for beta in BETAS for k in (1, 2)),
]


def name_of(divergence: Divergence) -> str:
    beta = f"-{divergence.beta}" if divergence.direction == "jsd" else ""
    k = f"-{divergence.top_k}" if divergence.granularity == "topk" else ""
    return f"{divergence.granularity}{k}-{divergence.direction}{beta}"


def logits(
    seed: int, *, tokens: int = 6, vocab_size: int = 5, scale: float = 2.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    return scale * torch.randn(tokens, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def compared(
    student: Tensor, teacher: Tensor, divergence: Divergence, ids: Tensor | None = None, *, logp_slopes: bool = True
) -> Compared:
    """Of copies: the tested function overwrites."""
    ids = torch.arange(len(student)) % student.shape[-1] if ids is None else ids
    return compare_(student.clone(), teacher.clone(), ids, divergence, entropy=True, logp_slopes=logp_slopes)


def buckets(student: Tensor, teacher: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Probabilities of both sides' buckets, by softmax and sums, row by row."""
    p, q = student.softmax(dim=-1), teacher.softmax(dim=-1)
    if divergence.granularity == "full" or divergence.top_k >= p.shape[-1]:
        return p, q
    rows = []
    for row in range(len(p)):
        order = sorted(range(p.shape[-1]), key=lambda v, row=row: -float(p.detach()[row, v]))
        top, rest = order[: divergence.top_k], order[divergence.top_k :]
        rows.append([torch.cat([side[row, top], side[row, rest].sum()[None]]) for side in (p, q)])
    return torch.stack([p for p, _ in rows]), torch.stack([q for _, q in rows])


def textbook(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    """(N,) by the formulas, differentiable; all logits finite."""
    p, q = buckets(student, teacher, divergence)
    if divergence.direction == "reverse":
        return (p * (p / q).log()).sum(dim=-1)
    if divergence.direction == "forward":
        return (q * (q / p).log()).sum(dim=-1)
    m = divergence.beta * q + (1 - divergence.beta) * p
    one, other = (q * (q / m).log()).sum(dim=-1), (p * (p / m).log()).sum(dim=-1)
    return divergence.beta * one + (1 - divergence.beta) * other


def slopes_by_autograd(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    student = student.clone().requires_grad_()
    return torch.autograd.grad(textbook(student, teacher, divergence).sum(), student)[0]


def close(found: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("divergence", ALL, ids=name_of)
@pytest.mark.parametrize("vocab_size", [3, 4, 5, 6])
def test_values_and_derivatives_are_those_of_the_formulas(divergence: Divergence, vocab_size: int) -> None:
    student, teacher = logits(0, vocab_size=vocab_size), logits(1, vocab_size=vocab_size)
    found = compared(student, teacher, divergence)
    close(found.divergence_C, textbook(student, teacher, divergence))
    assert found.divergence_C.sum() > 0.01
    close(found.slopes[0], slopes_by_autograd(student, teacher, divergence))
    close(compared(student, teacher, divergence, logp_slopes=False).slopes[0], found.slopes[0])


@pytest.mark.parametrize("divergence", ALL, ids=name_of)
def test_log_probs_and_entropies_are_the_students(divergence: Divergence) -> None:
    """With derivative; sampled ids among the top and in the rest."""
    student, teacher = logits(2, tokens=10), logits(3, tokens=10)
    ids = torch.arange(10) % 5
    assert 0 < sum(int(i) in row for i, row in zip(ids, student.topk(2).indices.tolist(), strict=True)) < 10
    found = compared(student, teacher, divergence, ids)
    all_logps = student.log_softmax(dim=-1)
    close(found.logps_C, all_logps[torch.arange(10), ids])
    close(found.entropy_C, -(all_logps.exp() * all_logps).sum(dim=-1))
    close(found.slopes[1], F.one_hot(ids, 5) - all_logps.exp())


@pytest.mark.parametrize(("direction", "given"), [("reverse", "student"), ("forward", "teacher")])
def test_directions_are_those_of_torch(direction: str, given: str) -> None:
    """`kl_div(input, target)` is the mean under the target."""
    student, teacher = logits(4).log_softmax(dim=-1), logits(5).log_softmax(dim=-1)
    target, other = (student, teacher) if given == "student" else (teacher, student)
    reference = F.kl_div(other, target, reduction="none", log_target=True).sum(dim=-1)
    close(compared(student, teacher, Divergence("full", direction)).divergence_C, reference)


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("beta", BETAS)
def test_jsd_is_that_of_trl(beta: float) -> None:
    """`generalized_jsd_loss` sums over ids and divides by what it is given; its derivative by autograd."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher = logits(6).requires_grad_(), logits(7)
    loss = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta, num_items_in_batch=1)
    found = compared(student.detach(), teacher, Divergence("full", "jsd", beta))
    close(found.divergence_C.sum(), loss.detach(), 1e-11)
    close(found.slopes[0], torch.autograd.grad(loss, student)[0], 1e-11)


def test_jsd_tends_to_forward_and_reverse() -> None:
    """Towards beta 0 it is beta times forward, towards 1 (1 - beta) times reverse."""
    student, teacher, small = logits(6), logits(7), 1e-6
    for direction, beta in (("forward", small), ("reverse", 1 - small)):
        jsd = compared(student, teacher, Divergence("full", "jsd", beta)).divergence_C / small
        close(jsd, compared(student, teacher, Divergence("full", direction)).divergence_C, 1e-3)


@pytest.mark.parametrize("divergence", ALL, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_logits_are_exactly_zero(divergence: Divergence, dtype: torch.dtype) -> None:
    student = logits(8, vocab_size=50, scale=8.0, dtype=dtype)
    student[0, 3], student[1, student[1].argmax()] = -math.inf, -math.inf
    found = compared(student, student, divergence)
    assert found.divergence_C.eq(0).all() and found.slopes[0].eq(0).all()
    shifted = compared(student, student + 3, divergence)  # the same distribution
    close(shifted.divergence_C, torch.zeros_like(shifted.divergence_C), 1e-5 if dtype == torch.float32 else 1e-13)


def test_a_sum_over_the_top_k_alone_is_not_stationary_where_both_are_equal() -> None:
    """Why there is a bucket for the rest."""
    student = logits(9).requires_grad_()
    logps, top = student.log_softmax(dim=-1), student.topk(2).indices
    teacher_logps = logps.detach()
    naive = (logps.exp() * (logps - teacher_logps)).gather(-1, top).sum()
    assert torch.autograd.grad(naive, student)[0].abs().max() > 0.1
    assert compared(student.detach(), student.detach(), Divergence("topk", top_k=2)).slopes[0].eq(0).all()


@pytest.mark.parametrize(("direction", "k"), list(product(DIRECTIONS, [5, 32])))
def test_all_ids_in_the_top_k_are_the_full_divergence(direction: str, k: int) -> None:
    student, teacher = logits(10), logits(11)
    full, top = (compared(student, teacher, Divergence(g, direction, 0.3, k)) for g in ("full", "topk"))
    assert torch.equal(full.divergence_C, top.divergence_C) and torch.equal(full.slopes[0], top.slopes[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_buckets_of_one_id_each_are_the_full_divergence(direction: str) -> None:
    """All ids but one are the top: the rest is the last one. More buckets never lower a divergence."""
    student, teacher = logits(10), logits(11)
    values = [compared(student, teacher, Divergence("topk", direction, top_k=k)) for k in (1, 2, 3, 4)]
    full = compared(student, teacher, Divergence("full", direction))
    close(values[-1].divergence_C, full.divergence_C)
    close(values[-1].slopes[0], full.slopes[0])
    for coarse, fine in pairwise(values):
        assert (coarse.divergence_C <= fine.divergence_C + 1e-12).all()


# ---- Where numbers end


@pytest.mark.parametrize("gap", [28.0, 60.0, 200.0])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_tiny_rest_in_fp32(direction: str, gap: float) -> None:
    """Masses of 1e-12, 1e-26 and 1e-87 (0 in fp32) on one side or both, against float64."""
    heads = torch.tensor([1.0, 0.5]).log(), torch.tensor([0.3, 1.0]).log()
    rows = [(a, b) for a, b in product((gap, 1.0), repeat=2)]
    student = torch.stack([torch.cat([heads[0], torch.tensor([-a, -a - 1])]) for a, _ in rows])
    teacher = torch.stack([torch.cat([heads[1], torch.tensor([-b, -b - 2])]) for _, b in rows])
    for divergence in (Divergence("topk", direction, top_k=2), Divergence("full", direction)):
        found = compared(student, teacher, divergence)
        exact = compared(student.double(), teacher.double(), divergence)
        torch.testing.assert_close(found.divergence_C.double(), exact.divergence_C, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.slopes[0].double(), exact.slopes[0], rtol=1e-4, atol=1e-6)
        assert found.divergence_C.isfinite().all()


INF = math.inf
RULED_OUT = {
    "teacher": ([1.0, 2.0, 0.0, -1.0], [1.0, -INF, 0.5, 0.0]),
    "teacher, in the rest": ([1.0, 2.0, 0.0, -1.0], [1.0, 0.5, -INF, -INF]),
    "student": ([1.0, -INF, -INF, -1.0], [1.0, 0.3, 0.5, 0.0]),
    "both": ([1.0, -INF, 0.0, -1.0], [1.0, -INF, 0.5, 0.0]),
    "both, the whole rest": ([1.0, 2.0, -INF, -INF], [1.0, 0.0, -INF, -INF]),
}


@pytest.mark.parametrize("who", RULED_OUT)
@pytest.mark.parametrize(
    "divergence", [Divergence(g, d, 0.3, 2) for g, d in product(("full", "topk"), DIRECTIONS)], ids=name_of
)
def test_ids_that_are_ruled_out(divergence: Divergence, who: str) -> None:
    """0 log 0 = 0; infinite exactly where the formula is, with a zero derivative; never NaN."""
    student, teacher = (torch.tensor([values, [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64) for values in RULED_OUT[who])
    found = compared(student, teacher, divergence)
    infinite = {"reverse": who.startswith("teacher"), "forward": who == "student", "jsd": False}[divergence.direction]
    assert bool(found.divergence_C[0].isinf()) == infinite and not found.divergence_C.isnan().any()
    assert not any(slopes.isnan().any() for slopes in found.slopes)
    assert found.divergence_C[1] == 0 and found.slopes[0][1].eq(0).all()
    if infinite:
        assert found.slopes[0][0].eq(0).all()
        with pytest.raises(
            ValueError, match=f"{divergence.direction} divergence.* not finite at 1 of 2 tokens; the first is inf"
        ):
            check_divergence(found.divergence_C, divergence.direction)
        return
    check_divergence(found.divergence_C, divergence.direction)
    # as with logits so low that their probabilities are next to nothing
    low = [torch.where(side.isinf(), -200.0, side) for side in (student, teacher)]
    close(found.divergence_C, compared(low[0], low[1], divergence).divergence_C)
    close(found.slopes[0], compared(low[0], low[1], divergence).slopes[0])


def test_broken_logits_are_not_taken_for_equal_ones() -> None:
    for divergence in ALL:
        teacher = logits(1)
        teacher[2, 1] = math.nan
        found = compared(logits(0), teacher, divergence).divergence_C
        assert found.isnan().tolist() == [False, False, True, False, False, False]
        with pytest.raises(ValueError, match="first is nan"):
            check_divergence(found, divergence.direction)
