"""Log-probs and entropies worked out by hand on a model that is a table, and against a Llama's own logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_opd import token_logps
from trl_opd.logprobs import score_in_batches, score_tokens, top_tokens

from .helpers import make_model

LN2, LN3 = math.log(2), math.log(3)
NEVER = -math.inf


class Table(nn.Module):
    """The logits after a token are a row of a table; the ids it was called with are kept."""

    def __init__(self, logits: list[list[float]] | Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=dtype))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        self.seen.append((input_ids, attention_mask))
        return SimpleNamespace(logits=self.logits[input_ids])


# p(.|0) = 1/2 1/4 1/4, p(.|1) uniform, p(.|2) = 1/8 1/8 3/4; logits may be shifted by any constant
PROBABILITIES = [[1 / 2, 1 / 4, 1 / 4], [1 / 3, 1 / 3, 1 / 3], [1 / 8, 1 / 8, 3 / 4]]
LOGITS = [[math.log(p) + shift for p in row] for row, shift in zip(PROBABILITIES, (7.0, -3.0, 0.0), strict=True)]


def all_real(ids: Tensor) -> Tensor:
    """A mask without padding."""
    return torch.ones_like(ids)


def close(one: Tensor, other: Tensor | list[list[float]], tolerance: float = 1e-6) -> None:
    """Asserts equality within an absolute tolerance, and in type and shape."""
    torch.testing.assert_close(one, torch.as_tensor(other, dtype=one.dtype), atol=tolerance, rtol=0)


# ---- By hand


def test_the_value_at_t_belongs_to_token_t() -> None:
    """0 -> 1 -> 2 -> 2 -> 0: log 1/4, log 1/3, log 3/4, log 1/8; nothing is known of the first token."""
    ids = torch.tensor([[0, 1, 2, 2, 0]])
    expected = [[0.0, -2 * LN2, -LN3, LN3 - 2 * LN2, -3 * LN2]]
    close(token_logps(Table(LOGITS), ids, all_real(ids)), expected)


def test_temperature_by_hand() -> None:
    """At 1/2 the probabilities are squared: after 0 they are 4/6, 1/6, 1/6; at 2 they are rooted: √2/(√2 + 2)."""
    ids = torch.tensor([[0, 0, 1]])
    close(token_logps(Table(LOGITS), ids, all_real(ids), temperature=0.5), [[0.0, math.log(4 / 6), math.log(1 / 6)]])
    root = math.sqrt(2)
    expected = [[0.0, math.log(root / (root + 2)), -math.log(root + 2)]]
    close(token_logps(Table(LOGITS), ids, all_real(ids), temperature=2.0), expected)


def test_entropy_by_hand() -> None:
    """After 0: 3/2 ln 2; after 1: ln 3. The value at t is that of the distribution token t was drawn from."""
    ids = torch.tensor([[0, 1, 0, 2]])
    entropy = score_tokens(Table(LOGITS), ids, all_real(ids))[1]
    close(entropy, [[0.0, 1.5 * LN2, LN3, 1.5 * LN2]])
    assert not entropy.requires_grad


def test_entropy_is_that_of_the_policy_at_its_temperature() -> None:
    """At 1/2 after 0: 4/6, 1/6, 1/6."""
    ids = torch.tensor([[0, 1]])
    entropy = score_tokens(Table(LOGITS), ids, all_real(ids), temperature=0.5)[1]
    close(entropy, [[0.0, -(4 / 6) * math.log(4 / 6) - 2 / 6 * math.log(1 / 6)]])


def test_rows_beyond_the_vocabulary_are_no_part_of_the_policy() -> None:
    """Two padding rows with logits of 20 and 50: with them p(1|0) would be e^-52; they get no gradient either."""
    table = Table(torch.cat([torch.tensor(LOGITS), torch.tensor([[20.0, 50.0]]).expand(3, 2)], dim=1))
    ids = torch.tensor([[0, 1, 2]])
    logps, entropy = score_tokens(table, ids, all_real(ids), vocab_size=3)
    close(logps, [[0.0, -2 * LN2, -LN3]])
    close(entropy, [[0.0, 1.5 * LN2, LN3]])
    logps.sum().backward()
    assert table.logits.grad is not None
    assert table.logits.grad[:, 3:].eq(0).all() and table.logits.grad[:2, :3].ne(0).all()
    assert token_logps(table, ids, all_real(ids))[0, 1] < -40


def test_tokens_that_are_ruled_out() -> None:
    """Logits of -inf: the others share the mass, the entropy is finite, the token itself gets -inf and no NaN."""
    table = Table([[0.0, NEVER, 0.0], [NEVER, NEVER, 5.0], [0.0, 0.0, 0.0]])
    ids = torch.tensor([[0, 2, 1, 2], [0, 1, 2, 0]])
    logps, entropy = score_tokens(table, ids, all_real(ids))
    close(logps, [[0.0, -LN2, -LN3, 0.0], [0.0, NEVER, 0.0, -LN3]])
    close(entropy, [[0.0, LN2, LN3, 0.0], [0.0, LN2, 0.0, LN3]])
    logps[0].sum().backward()
    assert table.logits.grad is not None and table.logits.grad.isfinite().all()


def test_impossible_padding_reaches_neither_value_nor_gradient() -> None:
    """The padding's id has logit -inf after every token, and NaN after itself."""
    nan = math.nan
    table = Table([[0.0, 0.0, NEVER], [0.0, LN3, NEVER], [nan, nan, nan]])
    ids, mask = torch.tensor([[0, 1, 1], [1, 2, 2]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    logps, entropy = score_tokens(table, ids, mask)
    close(logps, [[0.0, -LN2, LN3 - 2 * LN2], [0.0, 0.0, 0.0]])
    assert entropy.isfinite().all() and entropy[1].eq(0).all()
    logps.sum().backward()
    assert table.logits.grad is not None and table.logits.grad[:2].isfinite().all()


# ---- Padding


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([[0, 1, 2, 0, 0], [2, 2, 0, 1, 1]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        ([[2, 2, 0, 1, 2], [2, 2, 0, 1, 1]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ([[1, 0, 1, 2, 1], [2, 2, 0, 1, 1]], [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    ],
    ids=["right", "left", "both"],
)
def test_padding_on_either_side(ids: list[list[int]], mask: list[list[int]]) -> None:
    """0 -> 1 -> 2 inside padding of other tokens' ids; a row's first real token and its padding get 0."""
    start = mask[0].index(1)
    expected = torch.zeros(2, 5)
    expected[0, start + 1 : start + 3] = torch.tensor([-2 * LN2, -LN3])
    expected[1] = torch.tensor([0.0, LN3 - 2 * LN2, -3 * LN2, -2 * LN2, -LN3])
    for dtype in (torch.long, torch.bool):
        logps, entropy = score_tokens(Table(LOGITS), torch.tensor(ids), torch.tensor(mask, dtype=dtype))
        close(logps, expected)
        assert entropy[0].nonzero().flatten().tolist() == [start + 1, start + 2]


def test_rows_stand_flush_left_in_the_forward_pass() -> None:
    """No column is padding in every row, each begins at position 0; one without a score is left out."""
    table = Table(LOGITS)
    ids = torch.tensor([[2, 2, 2, 0, 1], [2, 1, 1, 2, 2], [0, 1, 0, 2, 2]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    token_logps(table, ids, mask)
    ((seen_ids, seen_mask),) = table.seen
    assert seen_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert [row[:length] for row, length in zip(seen_ids.tolist(), [2, 3], strict=True)] == [[0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    ("ids", "mask"), [([[1]], [[1]]), ([[1], [2]], [[1], [1]]), ([[2, 1, 2], [2, 2, 1]], [[0, 1, 0], [0, 0, 1]])]
)
def test_rows_of_one_token(ids: list[list[int]], mask: list[list[int]]) -> None:
    """There is nothing to score: zeros of the right shape, and a gradient that is 0."""
    table = Table(LOGITS)
    logps, entropy = score_tokens(table, torch.tensor(ids), torch.tensor(mask))
    assert logps.eq(0).all() and entropy.eq(0).all() and logps.shape == entropy.shape == torch.tensor(ids).shape
    logps.sum().backward()
    assert table.logits.grad is not None and table.logits.grad.eq(0).all()


def test_a_row_of_one_token_among_longer_ones() -> None:
    ids, mask = torch.tensor([[0, 1, 2], [2, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    close(token_logps(Table(LOGITS), ids, mask), [[0.0, -2 * LN2, -LN3], [0.0, 0.0, 0.0]])


# ---- Precision


def test_a_bf16_model_gets_fp32_log_probs() -> None:
    """Log-softmax in fp32 of the bf16 logits; taken in bf16 it would be off by more than 0.01."""
    torch.manual_seed(0)
    table = Table(torch.randn(50, 50) * 3, dtype=torch.bfloat16)
    ids = torch.randint(50, (2, 9))
    logps, entropy = score_tokens(table, ids, all_real(ids))
    exact = table.logits.detach().double().log_softmax(dim=-1)
    expected = torch.stack([exact[row[:-1], row[1:]] for row in ids])
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps[:, 1:].double(), expected, atol=2e-6, rtol=0)
    coarse = table.logits.detach().log_softmax(dim=-1)
    assert (torch.stack([coarse[row[:-1], row[1:]] for row in ids]).double() - expected).abs().max() > 0.01


def test_a_float64_model_keeps_its_precision() -> None:
    torch.manual_seed(0)
    model, ids = make_model(dtype=torch.float64), torch.randint(43, (2, 7))
    logps, entropy = score_tokens(model, ids, all_real(ids), temperature=0.9)
    exact = (model(input_ids=ids).logits / 0.9).log_softmax(dim=-1)
    assert logps.dtype == entropy.dtype == torch.float64
    torch.testing.assert_close(logps[:, 1:], exact[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1), atol=1e-13, rtol=0)
    torch.testing.assert_close(entropy[:, 1:], -(exact.exp() * exact).sum(dim=-1)[:, :-1], atol=1e-13, rtol=0)


def test_log_softmax_is_fp32_under_bf16_autocast() -> None:
    """Only the model runs in bf16: the values are those of the fp32 log-softmax of its bf16 logits."""
    torch.manual_seed(0)
    model, ids = make_model(), torch.randint(43, (2, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = token_logps(model, ids, all_real(ids), temperature=0.7)
        logits = model(input_ids=ids, attention_mask=all_real(ids), use_cache=False).logits
    assert logits.dtype == torch.bfloat16 and logps.dtype == torch.float32
    exact = (logits.double() / 0.7).log_softmax(dim=-1)
    expected = exact[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(logps[:, 1:].double(), expected, atol=5e-6, rtol=0)


# ---- A real model


def plain_logps(model: PreTrainedModel, ids: Tensor, temperature: float, vocab_size: int | None) -> Tensor:
    """(B, T - 1): the textbook way, for rows without padding."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab_size]
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def biased(model: PreTrainedModel) -> PreTrainedModel:
    """With a bias on the head, as GPT-J and Phi have."""
    head = nn.Linear(16, 43, bias=True)
    nn.init.normal_(head.bias, std=3.0)
    model.set_output_embeddings(head)
    return model


def resized(model: PreTrainedModel) -> PreTrainedModel:
    """With rows added for new tokens and up to a multiple of 64."""
    model.resize_token_embeddings(50, pad_to_multiple_of=64)
    return model


VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "plain": make_model,
    "tied": lambda: make_model(tie_word_embeddings=True),
    "bias": lambda: biased(make_model()),
    "resized": lambda: resized(make_model()),
    "resized and tied": lambda: resized(make_model(tie_word_embeddings=True)),
    "one head row too many": lambda: make_model(vocab_size=44),
}


@pytest.mark.parametrize(("temperature", "vocab_size"), [(1.0, None), (0.7, 43)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_the_models_own_logits(
    variant: str, temperature: float, vocab_size: int | None
) -> None:
    """Each row alone through log_softmax and autograd, against all in one padded batch; tokens weigh differently."""
    model = VARIANTS[variant]().double()
    torch.manual_seed(1)
    rows = [torch.randint(43, (length,)) for length in (4, 7, 1, 5)]
    ids, mask, weight = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9), torch.randn(4, 9, dtype=torch.float64)
    for row, (start, tokens) in enumerate(zip((0, 2, 5, 4), rows, strict=True)):
        ids[row, start : start + len(tokens)], mask[row, start : start + len(tokens)] = tokens, 1

    logps = token_logps(model, ids, mask, temperature=temperature, vocab_size=vocab_size)
    (logps * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    for row, tokens in enumerate(rows):
        plain = plain_logps(model, tokens[None], temperature, vocab_size)[0]
        real = mask[row].bool()
        torch.testing.assert_close(logps[row][real][1:], plain, atol=1e-10, rtol=0)
        (plain * weight[row][real][1:]).sum().backward()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-9, rtol=1e-9, msg=name)


def test_the_head_is_scored_over_all_its_rows_unless_told_otherwise() -> None:
    """A resized head's new rows carry mass; cutting them off renormalises the rest."""
    model, ids = resized(make_model()), torch.randint(43, (1, 6), generator=torch.Generator().manual_seed(0))
    whole = token_logps(model, ids, all_real(ids))[:, 1:]
    cut = token_logps(model, ids, all_real(ids), vocab_size=43)[:, 1:]
    logps = model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
    torch.testing.assert_close(whole - cut, logps[..., :43].logsumexp(dim=-1), atol=1e-5, rtol=0)
    assert (whole < cut).all()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_scoring_in_batches_changes_nothing(batch_size: int) -> None:
    """Batches of other widths than the whole; no gradient."""
    torch.manual_seed(0)
    model, ids = make_model(), torch.randint(40, (5, 8))
    mask = torch.arange(8) < torch.tensor([3, 8, 2, 5, 4])[:, None]
    scores = score_in_batches(model, ids, mask, temperature=0.8, vocab_size=40, batch_size=batch_size)
    assert not scores.requires_grad
    expected = token_logps(model, ids, mask, temperature=0.8, vocab_size=40)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_inputs_are_not_written_to() -> None:
    ids, mask = torch.tensor([[2, 0, 1], [1, 2, 2]]), torch.tensor([[0, 1, 1], [1, 1, 0]])
    kept = ids.clone(), mask.clone()
    token_logps(Table(LOGITS), ids, mask)
    assert torch.equal(ids, kept[0]) and torch.equal(mask, kept[1])


# ---- The likeliest tokens


def test_top_tokens_stand_at_the_place_they_compete_for() -> None:
    """By hand, with padding on the left and on the right."""
    ids = torch.tensor([[1, 0, 2, 2], [0, 2, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    top, logps = top_tokens(Table(LOGITS), ids, mask, 1, temperature=1.0, vocab_size=3)
    assert top[..., 0].tolist() == [[0, 0, 0, 2], [0, 0, 0, 0]]
    close(logps[..., 0], [[0.0, 0.0, -LN2, LN3 - 2 * LN2], [0.0, -LN2, 0.0, 0.0]])


def test_top_tokens_of_a_row_are_those_of_the_models_own_logits() -> None:
    model, ids = make_model(3), torch.randint(0, 43, (3, 9), generator=torch.Generator().manual_seed(1))
    top, logps = top_tokens(model, ids, all_real(ids), 5, temperature=0.7, vocab_size=40)
    expected = (model(ids).logits[:, :-1, :40].detach() / 0.7).log_softmax(-1).topk(5)
    assert torch.equal(top[:, 1:], expected.indices)
    close(logps[:, 1:], expected.values, 1e-5)
