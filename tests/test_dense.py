"""Divergences from hidden states in chunks: values, gradients and memory, against whole logits and autograd; and the exact
facts about what such a loss teaches, by sums over all completions."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trl_opd.dense import Comparison, Scores, TeacherView, compare_hidden, compare_linear, compare_logits
from trl_opd.divergence import DIRECTIONS, Divergence
from trl_opd.heads import score_linear, zeros_after
from trl_opd.linear_head import LogitRule, Policy

from . import test_divergence
from .test_divergence import close, name_of
from .test_exact_gradient import (
    PROMPTS,
    STUDENT,
    TEACHER,
    V,
    all_completions,
    chain,
    expected,
    gradient_of,
    gradients,
    held_prefixes_gradient,
    prefix_number,
    sampled_loss,
)
from .test_heads import RULES, LargestTensor

N, H, K, ROWS, TEACHER_ROWS, IDS = 7, 5, 4, 11, 13, 9
"""Tokens, widths of student and teacher, rows of their heads, ids that both policies range over."""
CHUNKS = {"one row": 1, "two rows": 4 * IDS + 4, "all but one": 6 * (ROWS + TEACHER_ROWS), "all": 10**4}
KINDS = [Divergence(g, d, 0.3, 3) for g, d in product(("full", "topk"), DIRECTIONS)]
TEACHER_RULE = LogitRule(times=0.8, cap=3.0)


def student_of(seed: int = 0, *, trained: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Hidden states that need a gradient, ids, weight and bias."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(N, H, dtype=dtype), torch.randn(ROWS, H, dtype=dtype)
    bias = torch.randn(ROWS, dtype=dtype).requires_grad_(trained)
    return hidden.requires_grad_(), torch.randint(IDS, (N,)), weight.requires_grad_(trained), bias


def teacher_of(seed: int = 1, temperature: float = 0.7, dtype: torch.dtype = torch.float64) -> tuple[TeacherView, Tensor]:
    """Of another width, number of rows and rule; and its policy's logits, written out."""
    torch.manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((N, K), (TEACHER_ROWS, K), (TEACHER_ROWS,)))
    view = TeacherView.linear(hidden, weight, bias, Policy(temperature, IDS, TEACHER_RULE))
    logits = 3.0 * torch.tanh(0.8 * F.linear(hidden, weight, bias) / 3.0)
    return view, logits[:, :IDS] / temperature


def expected_scores(logits: Tensor, ids: Tensor, teacher: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor, Tensor]:
    """By `log_softmax` and the formulas, of whole logits of both policies; differentiable."""
    logps = logits.log_softmax(dim=-1)
    entropy = -(logps.exp() * logps).sum(dim=-1).detach()
    return logps[torch.arange(len(ids)), ids], entropy, test_divergence.textbook(logits, teacher, divergence)


def total(scores: Scores | tuple[Tensor, Tensor, Tensor], *, policy_gradient: bool = True) -> Tensor:
    """A sum in which each token and each kind of score has another weight."""
    weights = torch.linspace(-1, 2, len(scores[0]), dtype=scores[0].dtype)
    loss = (scores[2] * weights.flip(0)).sum()
    return loss + (scores[0] * weights).sum() if policy_gradient else loss


def own_logits(head_logits: Tensor, rule: LogitRule, temperature: float) -> Tensor:
    """The rule written out, the ids cut, the temperature."""
    logits = head_logits * rule.times / rule.over
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    return logits[:, :IDS] / temperature


# ---- A head


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients_are_those_of_whole_logits(divergence: Divergence, trained: bool, rule: str) -> None:
    """In float64, for each size of chunk, with and without a gradient of the log-probs."""
    hidden, ids, weight, bias = student_of(trained=trained)
    view, teacher = teacher_of()
    needed = (hidden, weight, bias) if trained else (hidden,)
    for elements, policy_gradient in product(CHUNKS.values(), [True, False]):
        comparison = Comparison(view, divergence, True, policy_gradient, elements)
        found = compare_linear(hidden, ids, weight, bias, Policy(0.7, IDS, RULES[rule]), comparison)
        reference = expected_scores(own_logits(F.linear(hidden, weight, bias), RULES[rule], 0.7), ids, teacher, divergence)
        assert [score.requires_grad for score in found] == [policy_gradient, False, True]
        for mine, theirs in zip(found, reference, strict=True):
            close(mine, theirs)
        for mine, theirs in zip(
            torch.autograd.grad(total(found, policy_gradient=policy_gradient), needed),
            torch.autograd.grad(total(reference, policy_gradient=policy_gradient), needed),
            strict=True,
        ):
            close(mine, theirs, 1e-11)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
def test_gradcheck(divergence: Divergence, trained: bool) -> None:
    """Both outputs against finite differences."""
    hidden, ids, weight, bias = student_of(2, trained=trained)
    comparison = Comparison(teacher_of()[0], divergence, chunk_elements=4 * IDS + 4)

    def scores(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        policy = Policy(0.8, IDS, RULES["times and cap"])
        logps, _, divergences = compare_linear(tensors[0], ids, tensors[1], tensors[2], policy, comparison)
        return logps, divergences

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
@pytest.mark.parametrize("elements", CHUNKS.values(), ids=CHUNKS)
def test_any_function_can_be_the_head_and_the_teachers(divergence: Divergence, elements: int) -> None:
    """Heads that are no linear maps; and whole logits, of the student and of the teacher."""
    hidden, ids, _, _ = student_of()
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(H, 4), nn.Tanh(), nn.Linear(4, ROWS)).double()
    teacher_head = nn.Sequential(nn.Linear(K, 4), nn.Tanh(), nn.Linear(4, TEACHER_ROWS)).double()
    teacher_hidden = torch.randn(N, K, dtype=torch.float64)
    policy, needed = Policy(0.7, IDS, RULES["cap"]), (hidden, *head.parameters())
    teacher = own_logits(teacher_head(teacher_hidden).detach(), TEACHER_RULE, 0.7)
    reference = expected_scores(own_logits(head(hidden), RULES["cap"], 0.7), ids, teacher, divergence)
    gradients_there = torch.autograd.grad(total(reference), needed)
    views = [
        TeacherView.of_head(teacher_hidden, teacher_head, Policy(0.7, IDS, TEACHER_RULE)),
        TeacherView.of_head(teacher_head(teacher_hidden), lambda logits: logits, Policy(0.7, IDS, TEACHER_RULE)),
    ]
    for view, whole in product(views, [False, True]):
        comparison = Comparison(view, divergence, entropy=True, chunk_elements=elements)
        if whole:
            found = compare_logits(head(hidden), ids, policy, comparison)
        else:
            found = compare_hidden(hidden, ids, head, policy, comparison)
        for mine, theirs in zip(found, reference, strict=True):
            close(mine, theirs)
        for mine, theirs in zip(torch.autograd.grad(total(found), needed), gradients_there, strict=True):
            close(mine, theirs, 1e-11)


def test_whole_logits_are_not_overwritten() -> None:
    hidden, ids, weight, bias = student_of()
    student, teacher = F.linear(hidden, weight, bias).detach(), F.linear(hidden, weight + 1, bias).detach()
    before = student.clone(), teacher.clone()
    view = TeacherView.of_head(teacher, lambda logits: logits, Policy())
    for divergence in KINDS:
        compare_logits(student, ids, Policy(), Comparison(view, divergence))
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_teacher_that_is_the_student_is_exactly_zero(divergence: Divergence, trained: bool, dtype: torch.dtype) -> None:
    """Each value and each gradient, bit for bit; its policy gradient is as ever."""
    hidden, ids, weight, bias = student_of(trained=trained, dtype=dtype)
    policy = Policy(0.7, IDS, RULES["cap"])
    view = TeacherView.linear(hidden, weight, bias.detach(), policy)
    logps, _, divergences = compare_linear(hidden, ids, weight, bias, policy, Comparison(view, divergence))
    assert divergences.eq(0).all()
    needed = (hidden, weight, bias) if trained else (hidden,)
    for gradient in torch.autograd.grad(divergences.sum(), needed, retain_graph=True):
        assert gradient.eq(0).all()
    assert all(gradient.abs().max() > 0.01 for gradient in torch.autograd.grad(logps.sum(), needed))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
def test_log_probs_and_entropies_are_those_without_a_teacher(divergence: Divergence, trained: bool) -> None:
    """`score_linear`'s, with their gradient."""
    hidden, ids, weight, bias = student_of(trained=trained)
    policy, needed = Policy(0.7, IDS, RULES["times"]), (hidden, weight, bias) if trained else (hidden,)
    found = compare_linear(hidden, ids, weight, bias, policy, Comparison(teacher_of()[0], divergence, entropy=True))
    reference = score_linear(hidden, ids, weight, bias, policy, entropy=True)
    for mine, theirs in zip(found[:2], reference, strict=True):
        close(mine, theirs)
    for mine, theirs in zip(
        torch.autograd.grad(found[0].sum(), needed), torch.autograd.grad(reference[0].sum(), needed), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", ["bf16 weights", "autocast"])
@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
def test_precision_is_that_of_the_models_own_logits(divergence: Divergence, how: str, trained: bool) -> None:
    """The student's logits rounded to bf16, all else in fp32, the teacher's never touched by autocast."""
    dtype = torch.bfloat16 if how == "bf16 weights" else torch.float32
    hidden, ids, weight, bias = student_of(3, trained=trained, dtype=dtype)
    view, teacher = teacher_of(dtype=torch.float32)
    needed = (hidden, weight, bias) if trained else (hidden,)
    policy = Policy(0.7, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else nullcontext():
        rounded = F.linear(hidden, weight, bias)
        found = compare_linear(hidden, ids, weight, bias, policy, Comparison(view, divergence, entropy=True))
        general = compare_hidden(
            hidden, ids, partial(F.linear, weight=weight, bias=bias), policy, Comparison(view, divergence)
        )
    assert rounded.dtype == torch.bfloat16 and all(score.dtype == torch.float32 for score in found)
    reference = expected_scores(rounded.float()[:, :IDS] / 0.7, ids, teacher, divergence)
    for scores in (found, general):
        torch.testing.assert_close(scores[2], reference[2], atol=5e-6, rtol=1e-6)
        torch.testing.assert_close(scores[0], reference[0], atol=5e-6, rtol=0)
        for mine, theirs in zip(
            torch.autograd.grad(total(scores), needed),
            torch.autograd.grad(total(reference), needed, retain_graph=True),
            strict=True,
        ):
            assert mine.dtype == theirs.dtype == dtype
            assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_a_teacher_in_bf16_is_multiplied_in_bf16() -> None:
    hidden, ids, weight, bias = student_of(dtype=torch.float32, trained=False)
    torch.manual_seed(5)
    teacher_hidden, teacher_weight = torch.randn(N, K, dtype=torch.bfloat16), torch.randn(IDS, K, dtype=torch.bfloat16)
    view = TeacherView.linear(teacher_hidden, teacher_weight, None, Policy(1.0, IDS))
    teacher = F.linear(teacher_hidden, teacher_weight).float()
    found = compare_linear(hidden, ids, weight, bias, Policy(1.0, IDS), Comparison(view, Divergence()))
    reference = expected_scores(F.linear(hidden, weight, bias)[:, :IDS], ids, teacher, Divergence())
    torch.testing.assert_close(found[2], reference[2], atol=1e-6, rtol=1e-6)
    wide = TeacherView.linear(teacher_hidden, teacher_weight, None, Policy(1.0, IDS), dtype=torch.float32)
    close(wide.logits(), F.linear(teacher_hidden.float(), teacher_weight.float()), 1e-6)
    assert (wide.logits() - teacher).abs().max() > 1e-4


def test_rows_of_a_view_by_slice_and_by_index() -> None:
    """Several teachers in one batch: each compared with its own rows."""
    hidden, ids, weight, bias = student_of()
    view, teacher = teacher_of()
    index = torch.tensor([5, 0, 3])
    close(view[index].logits(), teacher[index])
    close(view[2:5].logits(), teacher[2:5])
    whole = compare_linear(hidden, ids, weight, bias, Policy(0.7, IDS), Comparison(view, Divergence()))[2]
    part = compare_linear(hidden[index], ids[index], weight, bias, Policy(0.7, IDS), Comparison(view, Divergence())[index])[2]
    close(part, whole[index])


@pytest.mark.parametrize("kind", ["frozen", "trained", "function", "logits"])
@pytest.mark.parametrize("divergence", [KINDS[0], KINDS[-1]], ids=name_of)
def test_no_token_at_all(kind: str, divergence: Divergence) -> None:
    """Gradients of zero, not None: DDP and FSDP wait for each parameter's."""
    hidden, ids, weight, bias = student_of(trained=kind != "frozen")
    comparison, policy = Comparison(teacher_of()[0][:0], divergence, entropy=True), Policy(0.7, IDS)
    if kind == "function":
        scores = compare_hidden(hidden[:0], ids[:0], lambda h: F.linear(h, weight, bias), policy, comparison)
    elif kind == "logits":
        scores = compare_logits(F.linear(hidden[:0], weight, bias), ids[:0], policy, comparison)
    else:
        scores = compare_linear(hidden[:0], ids[:0], weight, bias, policy, comparison)
    assert [score.shape for score in scores] == [(0,)] * 3
    zeros_after(scores[2], (1,), hidden.dtype).sum().backward()
    assert all(tensor.grad.eq(0).all() for tensor in (hidden, weight, bias) if tensor.requires_grad)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("granularity", ["full", "topk"])
def test_an_id_that_the_teacher_rules_out(granularity: str, trained: bool) -> None:
    """The value is infinite there and the gradient zero; what the other tokens give to a trained head is as without it."""
    hidden, ids, weight, bias = student_of(trained=trained)
    logits = teacher_of()[1]
    logits[2, 1] = -math.inf
    view = TeacherView.of_head(logits, lambda rows: rows, Policy())
    comparison = Comparison(view, Divergence(granularity, top_k=3))
    needed = (hidden, weight, bias) if trained else (hidden,)
    found = compare_linear(hidden, ids, weight, bias, Policy(0.7, IDS), comparison)[2]
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    assert found.isinf().tolist() == [row == 2 for row in range(N)]
    rest = compare_linear(hidden[others], ids[others], weight, bias, Policy(0.7, IDS), comparison[others])[2]
    for mine, theirs in zip(torch.autograd.grad(found.sum(), needed), torch.autograd.grad(rest.sum(), needed), strict=True):
        close(mine, theirs)


def test_policies_that_range_over_different_ids_are_an_error_of_ours() -> None:
    hidden, ids, weight, bias = student_of()
    with pytest.raises(AssertionError, match=r"\(7, 11\) and \(7, 9\) logits"):
        compare_linear(hidden, ids, weight, bias, Policy(0.7), Comparison(teacher_of()[0], Divergence()))


def test_many_small_gradients_of_a_bf16_head_are_not_lost() -> None:
    """1,024 equal terms, a chunk each: added up in bf16, 256 of them would make the rest vanish."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    view = TeacherView.of_head(torch.tensor([[0.0, math.log(3)]]).expand(1024, 2), lambda logits: logits, Policy())
    comparison = Comparison(view, Divergence("full", "forward"), chunk_elements=4)
    compare_linear(hidden, torch.zeros(1024, dtype=torch.long), weight, None, Policy(), comparison)[2].sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [256.0, -256.0]


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
@pytest.mark.parametrize("trained", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_exists(divergence: Divergence, trained: bool) -> None:
    """Nor is one kept: of 64 tokens and 4,096 ids in chunks of four tokens."""
    tokens, ids, elements = 64, 4096, 8 * 4096
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 3).requires_grad_(), torch.randn(ids, 3).requires_grad_(trained)
    view = TeacherView.linear(torch.randn(tokens, 2), torch.randn(ids, 2), None, Policy())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    comparison = Comparison(view, divergence, entropy=True, chunk_elements=elements)
    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = compare_linear(hidden, torch.randint(ids, (tokens,)), weight, None, Policy(), comparison)
        total(scores).backward()
    assert largest.elements <= elements / 2
    assert sum(kept.values()) <= hidden.numel() * 2 + (weight.numel() if trained else 0) + 3 * tokens


# ---- What such a loss teaches


def dense_loss(table: Tensor, ids: list[int], y: list[int], divergence: Divergence, policy_gradient: bool = False) -> Tensor:
    """Sum over a completion's steps of the divergence, from whole logits of student and teacher."""
    rows = [prefix_number(ids + y[:t]) for t in range(len(y))]
    view = TeacherView.of_head(TEACHER.table.detach()[rows], lambda logits: logits, Policy())
    comparison = Comparison(view, divergence, policy_gradient=policy_gradient)
    return compare_logits(table[rows], torch.tensor(y), Policy(), comparison)[2].sum()


def test_its_expected_gradient_is_that_of_the_sampled_advantage_at_discount_0() -> None:
    """Both are the gradient of the sum of KL_t with the visited prefixes held."""
    for prompt, ids in PROMPTS.items():
        full = expected(gradients(partial(dense_loss, divergence=Divergence()), ids), ids)
        close(full, held_prefixes_gradient(prompt))
        close(full, expected(gradients(sampled_loss, ids), ids))


def test_its_gradient_varies_less() -> None:
    """Full, then top-1 with a rest, then sampled; here by sums over all completions."""
    ids = PROMPTS["a"]

    def variance(loss: Any) -> float:
        each = gradients(loss, ids)
        mean = expected(each, ids)
        return float(expected([(gradient - mean).square().sum() for gradient in each], ids))

    full = variance(partial(dense_loss, divergence=Divergence()))
    assert full < 0.5 * variance(sampled_loss) and variance(sampled_loss) < variance(partial(sampled_loss, discount=1.0))
    assert variance(partial(dense_loss, divergence=Divergence("topk", top_k=1))) < variance(sampled_loss)


def test_its_value_as_an_advantage_would_teach_nothing() -> None:
    """It does not depend on the sampled token: the expected policy gradient is zero. So no loss here takes it for one."""

    def as_advantage(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
        rows = [prefix_number(ids + y[:t]) for t in range(len(y))]
        view = TeacherView.of_head(TEACHER.table.detach()[rows], lambda logits: logits, Policy())
        logps, _, divergences = compare_logits(table[rows], torch.tensor(y), Policy(), Comparison(view, Divergence()))
        return (logps * divergences.detach()).sum()

    for ids in PROMPTS.values():
        each = gradients(as_advantage, ids)
        assert max(float(gradient.abs().max()) for gradient in each) > 0.01
        close(expected(each, ids), torch.zeros_like(each[0]))


def test_with_the_sampled_advantages_of_later_tokens_it_is_the_gradient_of_the_kl_of_sequences() -> None:
    """Discount 1: the exact term now, and the log-prob weighed by what is sampled later."""
    for ids in PROMPTS.values():

        def loss(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
            rows = [prefix_number(ids + y[:t]) for t in range(len(y))]
            view = TeacherView.of_head(TEACHER.table.detach()[rows], lambda logits: logits, Policy())
            logps, _, divergences = compare_logits(table[rows], torch.tensor(y), Policy(), Comparison(view, Divergence()))
            kl = (logps - chain(TEACHER.table.detach(), ids, y)).detach()
            later = kl.flip(0).cumsum(0).flip(0) - kl
            return (divergences + logps * later).sum()

        def kl_of_sequences(table: Tensor, ids: list[int] = ids) -> Tensor:
            p = torch.stack([chain(table, ids, y).sum() for y in all_completions()])
            q = torch.stack([chain(TEACHER.table.detach(), ids, y).sum() for y in all_completions()])
            return (p.exp() * (p - q)).sum()

        close(expected(gradients(loss, ids), ids), gradient_of(kl_of_sequences))


def test_the_tables_are_large_enough_to_tell() -> None:
    """A top-1 divergence, forward and jsd have other gradients than full reverse, at the student."""
    assert V == 3 and STUDENT.table.shape == TEACHER.table.shape
    ids = PROMPTS["a"]
    reference = held_prefixes_gradient("a")
    for divergence in (Divergence("topk", top_k=1), Divergence("full", "forward"), Divergence("full", "jsd")):
        found = expected(gradients(partial(dense_loss, divergence=divergence), ids), ids)
        assert (found - reference).abs().max() > 1e-3
    close(
        expected(gradients(partial(dense_loss, divergence=replace(Divergence("topk"), top_k=2)), ids), ids), reference
    )  # two ids and the rest are all three
