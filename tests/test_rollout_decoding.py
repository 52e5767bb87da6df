"""Prompts read once and ended rows dropped: the completions are those of one plain call of `generate`, exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from trl_opd.batch import Completion
from trl_opd.rollout import TransformersEngine
from trl_opd.rollout.decoding import has_cache_of_rows
from trl_opd.rollout.sampling import BLOCK, draw

from .helpers import make_config, make_model
from .test_rollout import adapted, fixed_model, noted, scores

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [20], [5, 6, 7], [20], [5, 6, 7], [7, 7], [30, 31, 32, 33]]
LIMITS = [3, 12, 1, 12, 9, 5, 12, 2]


def complete(tmp_path: Path, model: Any, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[Completion]:
    """Completions of at most 12 tokens, all rows in one chunk."""
    settings = dict(settings)
    limits, stops = settings.pop("limits", None), settings.pop("stop_ids", [1, 4, 9])
    args = make_config(tmp_path, max_completion_length=12, per_device_rollout_batch_size=64, **settings)
    engine = TransformersEngine(args, stop_ids=stops, pad_id=0, vocab_size=43)
    return engine.generate(model, prompts, list(range(len(prompts))), limits)


def mistral(sliding_window: int | None) -> MistralForCausalLM:
    """A tiny model with the same weights for any window."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(
        vocab_size=43, num_key_value_heads=2, sliding_window=sliding_window, initializer_range=0.15, **sizes
    )
    return MistralForCausalLM(config).eval()


def same(these: list[Completion], those: list[Completion]) -> None:
    assert [c.ids for c in these] == [c.ids for c in those]
    assert [c.stopped for c in these] == [c.stopped for c in those]
    torch.testing.assert_close(noted(these), noted(those), atol=1e-5, rtol=1e-5)


def passes(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Fills with the shape of the ids of each forward pass."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 5, "temperature": 1.4},
        {"min_p": 0.1},
        {"repetition_penalty": 1.8},
        {"limits": LIMITS},
        {"limits": LIMITS, "repetition_penalty": 1.8, "top_p": 0.9, "temperature": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_completions_are_those_of_the_plain_path(settings: dict[str, Any], adapter: bool, tmp_path: Path) -> None:
    """Ragged prompts, some equal, three stop tokens. A window longer than all rows is none, but takes the plain path."""
    models = [mistral(window) for window in (None, 100)]
    model, plain = [adapted(base) for base in models] if adapter else models
    assert has_cache_of_rows(model) and not has_cache_of_rows(plain)
    fast = complete(tmp_path, model, **settings)
    same(fast, complete(tmp_path, plain, **settings))
    assert len({len(completion.ids) for completion in fast}) > 1
    limits = settings.get("limits", [12] * len(PROMPTS))
    assert all(len(c.ids) == limit or c.stopped for c, limit in zip(fast, limits, strict=True))
    temperature = settings.get("temperature", 1.0)
    torch.testing.assert_close(noted(fast), scores(model, PROMPTS, fast, temperature=temperature), atol=1e-4, rtol=0)


def test_each_prompt_is_read_once_and_ended_rows_are_not_read_again(tmp_path: Path) -> None:
    """Eight rows of five prompts; a pass never has a row whose limit was reached before the last one dropped rows."""
    model = make_model()
    shapes = passes(model)
    complete(tmp_path, model, limits=LIMITS, stop_ids=[1000])
    assert shapes[0] == (5, 9)
    # with eight rows or fewer, one in eight is any: pass t reads the rows that have more than t tokens to write
    assert shapes[1:] == [(sum(limit > t for limit in LIMITS), 1) for t in range(1, 12)]


def test_columns_that_only_padded_ended_rows_are_dropped(tmp_path: Path) -> None:
    """The long prompt ends first: the attention of the others reads their own tokens only."""
    model = make_model()
    keys: list[int] = []
    attention = model.get_submodule("model.layers.0.self_attn")

    def note(_: Any, __: Any, kwargs: Any, ___: Any) -> None:
        keys.append(kwargs["cache"].layers[0].keys.shape[2])

    attention.register_forward_hook(note, with_kwargs=True)
    complete(tmp_path, model, [[5] * 9, [6, 7]], limits=[2, 5], stop_ids=[1000])
    assert keys == [9, 10, 4, 5, 6]  # two prompts; one token each; the second row's 2 + 2, ...


def test_rows_that_end_at_once(tmp_path: Path) -> None:
    """All with their first token: nothing is decoded."""
    model = fixed_model({9: 1 - 1e-9})
    shapes = passes(model)
    assert [c.ids for c in complete(tmp_path, model)] == [[9]] * 8 and len(shapes) == 1


def test_order_of_the_caller_and_seeds_survive_the_sorting(tmp_path: Path) -> None:
    """Two at a time in any order of the prompts: each prompt keeps its completion."""
    model = make_model(initializer_range=0.15)
    args = make_config(tmp_path, max_completion_length=12, per_device_rollout_batch_size=2)
    engine = TransformersEngine(args, stop_ids=[1], pad_id=0, vocab_size=43)
    expected = complete(tmp_path, model, limits=LIMITS, stop_ids=[1])
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40000, 5000):
        got = engine.generate(model, [PROMPTS[i] for i in order], list(order), [LIMITS[i] for i in order])
        same(got, [expected[i] for i in order])
    shapes = passes(model)
    engine.generate(model, PROMPTS, list(range(8)), [1] * 8)
    assert shapes == [(2, 9), (1, 3), (2, 3), (1, 1)]  # longest first
    shapes.clear()
    engine.generate(model, [[5, 6], [7, 8], [5, 6], [7, 8]], list(range(4)), [1] * 4)
    assert shapes == [(1, 2), (1, 2)]  # equal prompts side by side


def test_a_sliding_window_takes_the_plain_path(tmp_path: Path) -> None:
    """Its cache forgets: it is given to `generate` once, every row with its prompt, and is right."""
    model = mistral(4)
    assert not has_cache_of_rows(model) and has_cache_of_rows(make_model()) and has_cache_of_rows(adapted(make_model()))
    shapes = passes(model)
    completions = complete(tmp_path, model)
    assert shapes[0] == (8, 9) and {shape[0] for shape in shapes} == {8}
    torch.testing.assert_close(noted(completions), scores(model, PROMPTS, completions), atol=1e-4, rtol=0)


def test_prefill_and_decode_are_named_in_a_profile(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        complete(tmp_path, make_model(), PROMPTS[:2])
    assert {"prefill", "decode"} <= {event.key for event in profile.key_averages()}


# ---- The draw


@pytest.mark.parametrize("vocab_size", [3, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_the_draw_inverts_the_distribution_function(vocab_size: int) -> None:
    """Each token has the share of (0, 1] that is its probability: by a grid, against a plain sum in float64."""
    torch.manual_seed(0)
    logits = torch.randn(vocab_size) * 2
    logits[torch.rand(vocab_size) < 0.3] = -torch.inf
    logits[0] = 1.0
    grid = (torch.arange(1, 20001, dtype=torch.float64) / 20000)[:, None]
    tokens, normalizers = draw(logits.expand(20000, -1), grid)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    assert (cumulative[tokens] >= grid - 1e-6).all()
    before = torch.where(tokens > 0, cumulative[tokens - 1], 0.0)
    assert (before < grid + 1e-6).all()
    assert logits[tokens].isfinite().all()
    torch.testing.assert_close(normalizers[0, 0], logits.logsumexp(-1))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    """At the ends of the interval, and just where one block ends and the next begins; probabilities far apart in size."""
    torch.manual_seed(1)
    logits: Tensor = torch.randn(64, 4 * BLOCK) * 20
    logits[:, ::2] = -torch.inf
    logits[:32, :BLOCK] = logits[:32, -BLOCK:] = -torch.inf
    sums = logits.softmax(-1).unflatten(1, (-1, BLOCK)).sum(-1).double().cumsum(-1)
    for uniforms in (torch.tensor([2.0**-53, 1e-300, 0.5, 1.0], dtype=torch.float64).expand(64, -1), sums / sums[:, -1:]):
        for column in uniforms.T:
            tokens, _ = draw(logits, column[:, None].clamp(min=1e-300))
            assert logits.gather(1, tokens).isfinite().all()
