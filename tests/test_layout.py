"""How sequences stand in forward passes: what is planned, and that scores and gradients are those of each sequence alone."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from trl_opd import token_logps
from trl_opd.batch import pad_right
from trl_opd.layout import PASS_COST, Layout, Sharing, plan_passes
from trl_opd.logprobs import score_in_batches, score_tokens
from trl_opd.prompt_sharing import prompt_sharing

from .helpers import lora, make_dataset, make_model, make_trainer, weights
from .test_architectures import ARCHITECTURES, NOT_BATCHED, build, logps_alone

FREE = Sharing(equal_length=1e9)
"""Attention costs nothing: whatever begins alike shares a row."""
SHARING = {
    "llama",
    "qwen3",
    "phi3",
    "granite",
    "cohere",
    "gptj",
    "gpt2",
    "opt",
    "gpt_neox",
    "persimmon",
    "mixtral",
    "qwen3_moe",
}
"""Architectures of full attention that take positions and a mask for each pair of tokens; the windows of others are 4 here."""


def batch(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and wanted mask of prompts with completions."""
    cpu = torch.device("cpu")
    ids = pad_right([p + c for p, c in rows], 0, torch.long, cpu)
    mask = pad_right([[1] * len(p + c) for p, c in rows], 0, torch.long, cpu)
    return ids, mask, pad_right([[0] * len(p) + [1] * len(c) for p, c in rows], 0, torch.long, cpu)


def group(prompt_length: int, *lengths: int, first: int = 5) -> list[tuple[list[int], list[int]]]:
    """Completions of one prompt, no two of which are the same."""
    prompt = [(first + 3 * i) % 38 + 4 for i in range(prompt_length)]
    return [(prompt, [(7 * (i + k) + first) % 38 + 4 for i in range(length)]) for k, length in enumerate(lengths)]


def seen_tokens(model: nn.Module) -> list[tuple[int, ...]]:
    """Filled with the shape of the ids of each forward pass."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


# ---- What is planned


def test_a_group_has_one_row_with_its_prompt_once() -> None:
    """Worked out by hand: prompt 10 11, completions 12 13 and 14."""
    ids, mask, wanted = batch([([10, 11], [12, 13]), ([10, 11], [14])])
    layout = Layout.of(ids, mask, wanted, FREE)
    assert layout.ids_RL.tolist() == [[10, 11, 12, 13, 14]]
    assert layout.positions_RL is not None and layout.positions_RL.tolist() == [[0, 1, 2, 3, 2]]
    assert layout.mask.int()[0, 0].tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert [column.tolist() for column in layout.sources] == [[0, 0, 0], [1, 2, 1]], "both begin after the prompt's last token"
    assert layout.targets_N.tolist() == [12, 13, 14]
    assert layout.moved_back(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[0, 0, 1, 2], [0, 0, 3, 0]]


def test_padding_is_seen_by_no_token_and_sees_some() -> None:
    """Two groups of different widths; a row of a mask without any True would be NaN."""
    ids, mask, wanted = batch([*group(3, 4, 2), *group(2, 1, 1, first=9)])
    layout = Layout.of(ids, mask, wanted, FREE)
    assert layout.ids_RL.shape == (2, 9)
    assert not layout.mask[1, 0, :4, 4:].any() and layout.mask[1, 0].diagonal().all()


def test_an_added_mask_says_the_same() -> None:
    ids, mask, wanted = batch(group(3, 4, 2))
    allowed, added = (Layout.of(ids, mask, wanted, Sharing(dtype=dtype)).mask for dtype in (None, torch.float32))
    assert added.dtype == torch.float32 and torch.equal(added == 0, allowed)
    assert (added[~allowed] == torch.finfo(torch.float32).min).all()


def test_sequences_of_like_lengths_share_a_pass() -> None:
    lengths = [1, 300, 2, 290, 3]
    ids, mask, wanted = batch([group(4, length, first=4 + n)[0] for n, length in enumerate(lengths)])
    assert plan_passes(ids, mask, wanted, None) == [[(1,), (3,)], [(4,), (2,), (0,)]]


def test_a_pass_is_not_made_for_less_than_it_costs() -> None:
    cost = PASS_COST["cpu"]
    for gap, passes in ((cost - 1, 1), (cost + 1, 2)):
        ids, mask, wanted = batch([group(4, 40)[0], group(4, 40 + gap, first=9)[0]])
        assert len(plan_passes(ids, mask, wanted, None)) == passes


@pytest.mark.parametrize("sharing", [None, FREE, Sharing(equal_length=40.0), Sharing(longest=12)])
def test_every_sequence_is_in_one_pass_that_is_within_the_limit(sharing: Sharing | None) -> None:
    """Thirty random batches; what has nothing to score is in none."""
    chance = random.Random(0)
    for _ in range(30):
        rows = [row for n in range(4) for row in group(chance.randint(1, 9), *chance.choices(range(1, 30), k=3), first=n + 4)]
        ids, mask, wanted = batch(rows)
        wanted[chance.randrange(len(rows))] = 0
        limit = chance.choice([1, 20, 60, inf])
        passes = plan_passes(ids, mask, wanted, sharing, limit)
        members = [number for made in passes for row in made for number in row]
        assert sorted(members) == wanted.any(dim=1).nonzero().flatten().tolist()
        for made in passes:
            layout = Layout.of(ids, mask, wanted, sharing, made)
            assert layout.ids_RL.numel() <= limit or (made == [made[0]] and len(made[0]) == 1)
            assert sorted(set(layout.places[0].tolist())) == sorted(number for row in made for number in row)


def test_nothing_to_score_is_one_empty_pass_and_a_stub() -> None:
    ids, mask, wanted = batch(group(3, 4, 2))
    assert plan_passes(ids, mask, torch.zeros_like(wanted), FREE) == [[]]
    layout = Layout.of(ids, mask, torch.zeros_like(wanted), FREE)
    assert layout.ids_RL.shape == (1, 2) and len(layout.targets_N) == 0


@pytest.mark.parametrize(
    ("prompt", "lengths", "rows"),
    [(400, [32] * 4, 1), (1, [300] * 4, 4), (40, [64] * 4, 2), (200, [400] * 8, 8)],
    ids=["long prompt", "next to none", "in twos", "long completions"],
)
def test_as_many_share_a_row_as_costs_least(prompt: int, lengths: list[int], rows: int) -> None:
    """Attention costs as much as all else at 600 tokens; a row of its own mask looks at all it has."""
    sharing = Sharing(equal_length=600.0)
    ids, mask, wanted = batch(group(prompt, *lengths))
    layout = Layout.of(ids, mask, wanted, sharing)

    def cost(count: int) -> float:
        width = prompt + lengths[0] * count
        return len(lengths) / count * width * (1 + width / 600)

    divisors = [n for n in range(1, len(lengths) + 1) if len(lengths) % n == 0]
    assert len(layout.ids_RL) == rows == len(lengths) // min(divisors, key=cost)


def test_a_sequence_longer_than_a_window_has_a_row_of_its_own() -> None:
    ids, mask, wanted = batch(group(6, 4, 4))
    for longest, rows in ((10, 1), (9, 2)):
        assert len(Layout.of(ids, mask, wanted, Sharing(longest=longest)).ids_RL) == rows


# ---- Scores and gradients are those of each sequence alone


@pytest.mark.parametrize("name", [*ARCHITECTURES, *NOT_BATCHED, "phimoe"])
def test_a_group_scores_as_each_of_its_sequences_alone(name: str) -> None:
    """Whether the architecture can share a row or not."""
    model, rows = build(name), group(9, 3, 1, 5)
    ids, mask, wanted = batch(rows)
    shapes = seen_tokens(model)
    with torch.no_grad():
        logps = token_logps(model, ids, mask, wanted_mask=wanted, temperature=0.7)
    assert shapes[-1] == ((1, 18) if name in SHARING | {"phimoe"} else (3, 14))
    for row, (prompt, completion) in enumerate(rows):
        expected = logps_alone(model, prompt + completion, 0.7)[9:]
        torch.testing.assert_close(logps[row, 9 : 9 + len(completion)], expected, atol=1e-5, rtol=0)


def windowed(cls: type[Any], config: type[Any], window: int, **more: Any) -> PreTrainedModel:
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"num_key_value_heads": 2, "vocab_size": 43, "sliding_window": window, "initializer_range": 0.4, "head_dim": 8}
    torch.manual_seed(0)
    model: PreTrainedModel = cls(config(**settings, **more)).eval()
    return model


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
@pytest.mark.parametrize(("window", "rows_made"), [(14, 1), (13, 3)])
def test_layers_of_a_sliding_window(kind: str, window: int, rows_made: int) -> None:
    """Sequences of up to 14 tokens; gpt_oss adds its mask to the scores, and alternates windowed and full layers."""
    if kind == "mistral":
        model = windowed(MistralForCausalLM, MistralConfig, window)
    else:
        model = windowed(GptOssForCausalLM, GptOssConfig, window, num_local_experts=2, num_experts_per_tok=2)
    rows = group(9, 3, 1, 5)
    ids, mask, wanted = batch(rows)
    shapes = seen_tokens(model)
    with torch.no_grad():
        logps = token_logps(model, ids, mask, wanted_mask=wanted)
    assert len(torch.empty(shapes[-1])) == rows_made
    for row, (prompt, completion) in enumerate(rows):
        expected = logps_alone(model, prompt + completion)[9:]
        torch.testing.assert_close(logps[row, 9 : 9 + len(completion)], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("planned", [False, True])
def test_a_long_sequence_keeps_its_window_beside_a_group_that_shares_a_row(planned: bool) -> None:
    """A mask for each pair of tokens is that of all rows of a pass, and has no window."""
    model = windowed(MistralForCausalLM, MistralConfig, 14)
    rows = [*group(8, 22, first=11), *group(8, 5, 5, 5, 4)]
    ids, mask, wanted = batch(rows)
    shapes = seen_tokens(model)
    if planned:
        logps = score_in_batches(model, ids, mask, wanted, temperature=1.0, vocab_size=43, batch_size=len(rows))
        assert (1, 27) in shapes  # the group in one row
    else:
        with torch.no_grad():
            logps = token_logps(model, ids, mask, wanted_mask=wanted)
    for row, (prompt, completion) in enumerate(rows):
        expected = logps_alone(model, prompt + completion)[8:]
        torch.testing.assert_close(logps[row, 8 : 8 + len(completion)], expected, atol=1e-5, rtol=0)


def test_attention_that_is_set_anew_gets_its_own_mask() -> None:
    """What the one reads as True and False, the other adds to its scores."""
    model = make_model(0)
    ids, mask, wanted = batch(group(9, 3, 1, 5))
    with torch.no_grad():
        before = token_logps(model, ids, mask, wanted_mask=wanted)
        model.set_attn_implementation("eager")
        after = token_logps(model, ids, mask, wanted_mask=wanted)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_padded_rows(attention: str, adapted: bool, checkpointing: bool) -> None:
    """Two groups and a single sequence in one pass, against each sequence in a row of its own, to 1e-5."""
    model: Any = make_model(0, attn_implementation=attention)
    if adapted:
        model = get_peft_model(model, lora(init_lora_weights=False))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids, mask, wanted = batch([*group(9, 3, 1, 5), *group(4, 2, 2, first=20), *group(3, 7, first=11)])
    weight = torch.linspace(-1, 2, ids.numel()).view_as(ids)
    found: list[dict[str, Tensor]] = []
    for together in (True, False):
        model.zero_grad()
        rows = [list(range(len(ids)))] if together else [[n] for n in range(len(ids))]
        for numbers in rows:
            logps, _ = score_tokens(model, ids[numbers], mask[numbers], wanted[numbers], temperature=0.7, vocab_size=40)
            (logps * weight[numbers]).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and found[0]
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], atol=1e-5 * float(grad.abs().max().clamp(min=1)), rtol=0)


def test_scores_in_several_passes_stand_at_their_places() -> None:
    model = make_model(0)
    rows = [*group(9, 3, 1, 5), *group(2, 20, 2, first=20), *group(3, 7, first=11)]
    ids, mask, wanted = batch(rows)
    scores = score_in_batches(model, ids, mask, wanted, temperature=0.7, vocab_size=43, batch_size=1, max_tokens=20)
    for row, (prompt, completion) in enumerate(rows):
        expected = torch.zeros(ids.shape[1])
        expected[len(prompt) : len(prompt + completion)] = logps_alone(model, prompt + completion, 0.7)[len(prompt) :]
        torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=0)


# ---- Training


@pytest.mark.parametrize("adapted", [False, True])
def test_training_in_parts_is_training_on_all(adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with groups of three: in parts of at most 30 tokens, in one part, and with each sequence in its own row."""
    prompts = [chr(97 + i) * (2 + 3 * (i % 3)) + "=" for i in range(12)]
    ends: list[dict[str, Tensor]] = []
    most: list[int] = []
    for name, limit in (("parts", 30), ("whole", None), ("alone", None)):
        if name == "alone":
            for place in ("trl_opd.logprobs", "trl_opd.steps"):
                monkeypatch.setattr(f"{place}.prompt_sharing", lambda model: None)
        trainer = make_trainer(
            tmp_path / name,
            peft_config=lora() if adapted else None,
            train_dataset=make_dataset(12).map(lambda row, i: {"prompt": prompts[i]}, with_indices=True),
            num_generations=3,
            per_device_train_batch_size=6,
            max_completion_length=8,
            max_steps=3,
            optim="sgd",  # Adam takes the sign of a gradient of rounding errors
            learning_rate=0.1,
            max_tokens_per_micro_batch=limit,
        )
        sizes: list[int] = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, sizes=sizes: sizes.append(kwargs["input_ids"].numel() if module.training else 0),
            with_kwargs=True,
        )
        trainer.train()
        most.append(max(sizes))
        ends.append(weights(trainer.model))
    assert most[0] <= 30 < most[1] < most[2]
    for end in ends[1:]:
        for name, value in end.items():
            torch.testing.assert_close(value, ends[0][name], atol=1e-5, rtol=0)


def test_a_model_is_probed_once() -> None:
    model = make_model(0)
    shapes = seen_tokens(model)
    assert prompt_sharing(model) is prompt_sharing(model) is not None
    assert len(shapes) == 2
