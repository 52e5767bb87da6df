"""Rollouts by `generate`: what is sampled is the policy that is trained, and nothing of the student is left changed."""

from __future__ import annotations

import copy
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from trl_opd import DistillationWarning, token_logps
from trl_opd.batch import Completion, Rollout
from trl_opd.checks import stop_token_ids
from trl_opd.rng import forked_rng
from trl_opd.rollout import TransformersEngine

from .helpers import lora, make_config, make_dataset, make_model, make_tokenizer, make_trainer, weights

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [20]]


def make_engine(tmp_path: Path, *, stop_ids: tuple[int, ...] = (1,), pad_id: int = 0, **settings: Any) -> TransformersEngine:
    """The trainer's engine with completions of at most 6 tokens."""
    args = make_config(tmp_path, **settings)
    return TransformersEngine(args, stop_ids=list(stop_ids), pad_id=pad_id, vocab_size=43)


def fixed_model(probabilities: dict[int, float], vocab_size: int = 43) -> PreTrainedModel:
    """A model whose next token has these probabilities whatever came before; the other tokens share the rest."""
    model = make_model(vocab_size=vocab_size)
    rest = (1 - sum(probabilities.values())) / (43 - len(probabilities))
    head = nn.Linear(16, vocab_size, bias=True)
    head.weight.data.zero_()
    head.bias.data.fill_(-100.0)
    head.bias.data[:43] = math.log(max(rest, 1e-30))
    for token, probability in probabilities.items():
        head.bias.data[token] = math.log(probability)
    model.set_output_embeddings(head)
    return model


def adapted(model: PreTrainedModel) -> PeftModel:
    """With a LoRA adapter whose B is not zero."""
    torch.manual_seed(3)
    peft_model = get_peft_model(model, lora(init_lora_weights=False))
    assert isinstance(peft_model, PeftModel)
    return peft_model


def sample(engine: TransformersEngine, model: Any, prompts: list[list[int]], seed: int = 0) -> list[Completion]:
    """Completions under a fixed seed."""
    torch.manual_seed(seed)
    return engine.generate(model, prompts)


def scores(model: Any, prompts: list[list[int]], completions: list[Completion], **settings: Any) -> Tensor:
    """(N,) log-probs of all sampled tokens, each row scored alone."""
    parts = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.ids])
        with torch.no_grad():
            parts.append(token_logps(model, ids, torch.ones_like(ids), **settings)[0, len(prompt) :])
    return torch.cat(parts)


def noted(completions: list[Completion]) -> Tensor:
    """(N,) log-probs noted while sampling."""
    return torch.tensor([logp for completion in completions for logp in completion.logps])


def figures_of_first_step(trainer: Any) -> dict[str, float]:
    """What the first step logged."""
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


def train(trainer: Any) -> dict[str, float]:
    """Trains; the figures of the first step."""
    trainer.train()
    return figures_of_first_step(trainer)


# ---- The checkpoint's generation config

LEAKS: dict[str, Any] = {
    "top_k": 1,
    "top_p": 0.001,
    "min_p": 0.9,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.9,
    "temperature": 0.01,
    "do_sample": False,
    "num_beams": 2,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(5, 30)),
    "begin_suppress_tokens": list(range(5, 30)),
    "bad_words_ids": [[token] for token in range(5, 30)],
    "sequence_bias": [[[token], -10.0] for token in range(5, 30)],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "eos_token_id": [3, 4, *range(20, 43)],
    "min_length": 14,
    "min_new_tokens": 6,
    "max_new_tokens": 1,
    "max_length": 10,
    "exponential_decay_length_penalty": (1, 5.0),
    "guidance_scale": 3.0,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "use_cache": False,
    "cache_implementation": "static",
    "max_time": 1e-9,
    "stop_strings": ["a"],
}


@pytest.fixture(scope="module", params=[False, True], ids=["model", "adapter"])
def clean_samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """An engine, a model, its base, and what they sample while the base's generation config is empty."""
    engine = make_engine(tmp_path_factory.mktemp("rollout"), max_completion_length=5)
    base = make_model(initializer_range=0.1)
    base.generation_config = GenerationConfig()
    model = adapted(base) if request.param else base
    return engine, model, base, sample(engine, model, PROMPTS)


@pytest.mark.parametrize("name", LEAKS)
def test_the_checkpoints_generation_config_does_not_leak(name: str, clean_samples: tuple[Any, ...]) -> None:
    """With the same seed the same tokens and log-probs as from a model without it; afterwards it is as it was."""
    engine, model, base, expected = clean_samples
    own = GenerationConfig()
    setattr(own, name, LEAKS[name])
    base.generation_config = own
    before = copy.deepcopy(own.to_dict())
    assert sample(engine, model, PROMPTS) == expected
    assert base.generation_config is own and own.to_dict() == before
    assert model.generation_config is own


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_the_generation_config_is_restored_after_an_error(adapter: bool, tmp_path: Path) -> None:
    """And so is train mode: a token id the model does not have makes `generate` fail inside."""
    base = make_model()
    base.generation_config.top_k = 7
    own = base.generation_config
    model = (adapted(base) if adapter else base).train()
    with pytest.raises(IndexError):
        make_engine(tmp_path).generate(model, [[5, 1000]])
    assert base.generation_config is own and model.generation_config is own and own.top_k == 7
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


def test_an_adapted_model_takes_a_new_generation_config_after_a_rollout(tmp_path: Path) -> None:
    """The engine leaves no attribute on the PeftModel that would hide the base's config from then on."""
    base = make_model()
    model = adapted(base)
    make_engine(tmp_path).generate(model, [[5]])
    base.generation_config = GenerationConfig(top_k=3)
    assert model.generation_config.top_k == 3


def test_samples_of_a_flat_distribution_are_diverse(tmp_path: Path) -> None:
    """64 draws of 43 equally likely tokens show about 33 of them; each has log-prob -ln 43 exactly."""
    model = fixed_model({})
    model.generation_config = GenerationConfig(top_k=1, top_p=0.001, repetition_penalty=1.1)
    engine = make_engine(tmp_path, max_completion_length=1, per_device_rollout_batch_size=64)
    completions = sample(engine, model, [[5]] * 64)
    assert 25 <= len({completion.ids[0] for completion in completions}) <= 41
    torch.testing.assert_close(noted(completions), torch.full((64,), -math.log(43)), atol=1e-6, rtol=0)


def test_frequencies_are_the_probabilities(tmp_path: Path) -> None:
    """Of 4,000 draws, 60% ± 4 standard errors are the token with probability 0.6, and 30% the other."""
    model = fixed_model({5: 0.6, 6: 0.3})
    engine = make_engine(tmp_path, max_completion_length=1, per_device_rollout_batch_size=4000)
    completions = sample(engine, model, [[9]] * 4000)
    for token, probability in ((5, 0.6), (6, 0.3)):
        drawn = [completion for completion in completions if completion.ids == [token]]
        assert abs(len(drawn) / 4000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000)
        torch.testing.assert_close(noted(drawn), torch.full((len(drawn),), math.log(probability)), atol=1e-5, rtol=0)


# ---- Stop tokens


@pytest.mark.parametrize(
    ("model_eos", "config_eos", "tokenizer_eos", "expected"),
    [
        ([2, 5], 2, "<bos>", [2, 5]),
        ([2, 5], None, "<eos>", [1, 2, 5]),
        (None, None, "<eos>", [1]),
        (5, [6, 7], None, [5, 6, 7]),
        (None, 6, None, [6]),
    ],
)
def test_stop_ids_are_the_union(
    model_eos: list[int] | int | None, config_eos: list[int] | int | None, tokenizer_eos: str | None, expected: list[int]
) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    model.generation_config.eos_token_id, model.config.eos_token_id = model_eos, config_eos
    tokenizer.eos_token = tokenizer_eos
    assert stop_token_ids(model, tokenizer) == expected == stop_token_ids(adapted(model), tokenizer)


def test_no_stop_id_at_all_is_an_error() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token or model\.generation_config\.eos_token_id"):
        stop_token_ids(model, tokenizer)


def test_each_of_several_stop_tokens_ends_a_completion_and_is_an_action(tmp_path: Path) -> None:
    """Stop tokens 2 and 5 with probability 0.2 each: a completion ends at the first of them, which keeps its log-prob."""
    model = fixed_model({2: 0.2, 5: 0.2})
    engine = make_engine(tmp_path, stop_ids=(2, 5), per_device_rollout_batch_size=80)
    completions = sample(engine, model, [[9, 2], [5]] * 40)
    for completion in completions:
        *others, last = completion.ids
        assert not {2, 5} & set(others)
        assert completion.stopped == (last in (2, 5))
        assert completion.stopped or len(completion.ids) == 6
        if completion.stopped:
            assert completion.logps[-1] == pytest.approx(math.log(0.2), abs=1e-5)
    assert {completion.ids[-1] for completion in completions if completion.stopped} == {2, 5}
    assert 0 < sum(not completion.stopped for completion in completions) < 80


def test_a_stop_token_in_the_last_place_is_a_stop(tmp_path: Path) -> None:
    (completion,) = sample(make_engine(tmp_path, stop_ids=(2,), max_completion_length=1), fixed_model({2: 1 - 1e-6}), [[9]])
    assert completion.ids == [2] and completion.stopped


def test_stop_ids_of_the_checkpoint_reach_the_trainers_mask(tmp_path: Path) -> None:
    """The tokenizer's EOS is 1, the checkpoint's [2, 5]: any of the three ends a row, inside the action mask."""
    model = fixed_model({1: 0.15, 2: 0.15, 5: 0.15})
    model.generation_config.eos_token_id = [2, 5]
    trainer = make_trainer(tmp_path, model=model)
    rollout = generated(trainer, 16)
    lasts = {ids[-1] for ids, stopped in zip(rollout.completion_ids(), rollout.stopped_B.tolist(), strict=True) if stopped}
    assert lasts == {1, 2, 5}
    check_masks(rollout)


# ---- Masks


def generated(trainer: Any, num_rows: int = 8) -> Rollout:
    """A rollout of the trainer's own data under a fixed seed."""
    with forked_rng(0):
        return trainer.generate_rollout(list(make_dataset(num_rows)))


def check_masks(rollout: Rollout) -> None:
    """Actions are the tokens from the prompt's end to the completion's, whatever their ids."""
    lengths = zip(rollout.prompt_lengths_B.tolist(), rollout.completion_lengths_B.tolist(), strict=True)
    for row, (prompt, completion) in enumerate(lengths):
        width = rollout.ids_BT.shape[1]
        assert rollout.mask_BT[row].tolist() == [prompt <= t < prompt + completion for t in range(width)]
        assert rollout.attention_mask_BT[row].tolist() == [t < prompt + completion for t in range(width)]
        assert rollout.sampled_logps_BT[row][~rollout.mask_BT[row]].eq(0).all()
        assert rollout.sampled_logps_BT[row][rollout.mask_BT[row]].lt(0).all()


def test_a_token_that_also_pads_is_an_ordinary_action(tmp_path: Path) -> None:
    """The pad id is that of a letter, which the student writes half of the time."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "a"
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int) and pad_id > 3
    trainer = make_trainer(tmp_path, model=fixed_model({pad_id: 0.5, 1: 0.2}), processing_class=tokenizer)
    rollout = generated(trainer)
    check_masks(rollout)
    drawn = rollout.sampled_logps_BT[rollout.mask_BT & (rollout.ids_BT == pad_id)]
    assert len(drawn) > 5
    torch.testing.assert_close(drawn, torch.full_like(drawn, math.log(0.5)), atol=1e-5, rtol=0)
    assert (rollout.ids_BT[~rollout.attention_mask_BT] == pad_id).all() and not rollout.attention_mask_BT.all()


def test_a_prompt_may_hold_stop_and_pad_tokens(tmp_path: Path) -> None:
    """Stop token at the prompt's start, inside and at its end; the completion begins after it all the same."""
    prompts = [[1, 5, 1], [0, 1, 0, 0, 6, 0, 1], [1]]
    model = make_model()
    completions = sample(make_engine(tmp_path), model, prompts)
    torch.testing.assert_close(noted(completions), scores(model, prompts, completions), atol=1e-4, rtol=0)
    rollout = Rollout.build(prompts, completions, [{}] * 3, pad_id=0, device=torch.device("cpu"))
    check_masks(rollout)


def test_where_pad_is_eos_the_stop_token_is_trained_and_the_padding_is_not(tmp_path: Path) -> None:
    """The stop token keeps its place, log-prob and advantage; the same id after it has none."""
    trainer = make_trainer(tmp_path, model=fixed_model({1: 0.3}), processing_class=make_tokenizer(pad=False))
    assert trainer.processing_class.pad_token_id == trainer.processing_class.eos_token_id == 1
    rollout = generated(trainer)
    check_masks(rollout)
    stops = rollout.mask_BT & (rollout.ids_BT == 1)
    assert stops.sum() == rollout.stopped_B.sum() > 0
    torch.testing.assert_close(rollout.sampled_logps_BT[stops], torch.full((int(stops.sum()),), math.log(0.3)))
    padding = ~rollout.attention_mask_BT
    assert padding.any() and (rollout.ids_BT[padding] == 1).all()
    batch = trainer.scored_batch(list(make_dataset(8)))
    assert batch.advantages_BT[batch.mask_BT & (batch.ids_BT == 1)].ne(0).all()
    assert batch.advantages_BT[~batch.mask_BT].eq(0).all()
    assert math.isfinite(train(trainer)["loss"])


# ---- The policy


def test_padded_vocabulary_rows_are_never_sampled_and_all_agree(tmp_path: Path) -> None:
    """+20 on the first padding row of the head. A teacher with the same weights but other padding gives a KL of 0."""

    def padded(vocab_size: int, logit: float) -> PreTrainedModel:
        torch.manual_seed(0)
        model, plain = make_model(vocab_size=vocab_size), make_model()
        state = {name: weight.clone() for name, weight in plain.state_dict().items()}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = torch.cat([state[name], torch.zeros(vocab_size - 43, 16)])
        model.load_state_dict(state)
        head = nn.Linear(16, vocab_size, bias=True)
        head.weight.data = state["lm_head.weight"]
        head.bias.data.zero_()
        head.bias.data[43] = logit
        model.set_output_embeddings(head)
        return model

    student, teacher, plain = padded(50, 20.0), padded(64, 30.0), make_model()
    completions = sample(make_engine(tmp_path), student, PROMPTS * 4)
    assert max(token for completion in completions for token in completion.ids) < 43
    torch.testing.assert_close(noted(completions), scores(plain, PROMPTS * 4, completions), atol=1e-4, rtol=0)

    trainer = make_trainer(tmp_path, model=student, teacher_model=teacher)
    with pytest.warns(DistillationWarning, match="the teacher scores as the student does"):
        figures = train(trainer)
    assert abs(figures["teacher_kl"]) < 1e-5 and figures["sampler_kl/v2"] < 1e-9


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_noted_log_probs_are_those_of_scoring_at_the_temperature(temperature: float, adapter: bool, tmp_path: Path) -> None:
    """Ragged prompts in one batch; at another temperature the log-probs would be others."""
    model = adapted(make_model()) if adapter else make_model()
    completions = sample(make_engine(tmp_path, temperature=temperature), model, PROMPTS)
    expected = scores(model, PROMPTS, completions, temperature=temperature)
    torch.testing.assert_close(noted(completions), expected, atol=1e-4, rtol=0)
    assert (noted(completions) - scores(model, PROMPTS, completions, temperature=temperature + 0.3)).abs().max() > 0.05


def test_dropout_of_an_adapter_does_not_reach_the_ratio(tmp_path: Path) -> None:
    """lora_dropout 0.5 and an adapter whose B is not zero, so that dropout would show: the first ratio is 1."""
    trainer = make_trainer(tmp_path, peft_config=lora(lora_dropout=0.5, init_lora_weights=False), max_steps=1)
    figures = train(trainer)
    assert abs(figures["ratio/max"] - 1) < 1e-4 and abs(figures["ratio/mean"] - 1) < 1e-5
    assert figures["sampler_kl/v2"] < 1e-9


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"repetition_penalty": 1.5}, {"top_k": 3, "temperature": 0.7}]
)
def test_truncated_sampling_is_told_once_and_scored_by_the_full_softmax(settings: dict[str, Any], tmp_path: Path) -> None:
    """Tokens come from the truncated distribution, log-probs from the one that is trained, so that the first ratio is 1."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(tmp_path, max_steps=1, **settings)
        rollout = generated(trainer)
        expected = token_logps(
            trainer.model, rollout.ids_BT, rollout.attention_mask_BT, temperature=settings.get("temperature", 1.0)
        )
        trainer.train()
    told = [str(warning.message) for warning in caught if "truncated distribution" in str(warning.message)]
    assert len(told) == 1 and all(f"{name} {value}" in told[0] for name, value in settings.items() if name != "temperature")
    sampled = rollout.sampled_logps_BT
    torch.testing.assert_close(sampled[rollout.mask_BT], expected.detach()[rollout.mask_BT], atol=1e-5, rtol=0)
    figures = figures_of_first_step(trainer)
    assert figures["ratio/max"] == pytest.approx(1.0, abs=1e-5) and figures["sampler_kl/v2"] < 1e-10


def test_truncation_is_really_applied(tmp_path: Path) -> None:
    """With top_k 1 all samples are the likeliest token, but keep the log-prob of the whole distribution."""
    with pytest.warns(DistillationWarning, match="truncated distribution"):
        trainer = make_trainer(tmp_path, model=fixed_model({7: 0.4, 8: 0.3}), top_k=1)
    rollout = generated(trainer)
    assert set(rollout.ids_BT[rollout.mask_BT].tolist()) == {7}
    drawn = rollout.sampled_logps_BT[rollout.mask_BT]
    torch.testing.assert_close(drawn, torch.full_like(drawn, math.log(0.4)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_no_temperature_no_distribution(temperature: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"temperature is {temperature}"):
        make_config(tmp_path, temperature=temperature)


def test_noise_on_the_embeddings_is_refused(tmp_path: Path) -> None:
    """NEFTune is on in training only: the first ratio would be noise."""
    with pytest.raises(ValueError, match=r"neftune_noise_alpha is 5\.0"):
        make_config(tmp_path, neftune_noise_alpha=5.0)


def test_an_adapted_student_samples_in_the_precision_it_trains_in(tmp_path: Path) -> None:
    """Under bf16 autocast an adapter that is still zero samples what the bare student samples, bit for bit, not fp32."""
    rollouts = []
    for name, settings in {"full": {}, "adapter": {"peft_config": lora()}, "fp32": {"bf16": False}}.items():
        trainer = make_trainer(tmp_path / name, **{"bf16": True, **settings})
        rollouts.append(generated(trainer))
    full, adapter, fp32 = rollouts
    assert torch.equal(full.ids_BT, adapter.ids_BT) and torch.equal(full.sampled_logps_BT, adapter.sampled_logps_BT)
    assert not torch.equal(full.sampled_logps_BT[0], fp32.sampled_logps_BT[0])


# ---- How it is generated


def widths_while_generating(model: nn.Module) -> list[tuple[int, ...]]:
    """Fills with the shape of the ids of each forward pass of the body."""
    shapes: list[tuple[int, ...]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    for module in model.modules():
        if type(module).__name__ == "LlamaForCausalLM":
            module.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_gradient_checkpointing_leaves_the_cache_on(adapter: bool, tmp_path: Path) -> None:
    """After the prompts each pass reads one token; the training passes read whole rows."""
    peft_config = lora() if adapter else None
    trainer = make_trainer(tmp_path, peft_config=peft_config, activation_checkpointing=True, max_steps=1)
    shapes = widths_while_generating(trainer.model)
    trainer.train()
    assert trainer.model.training
    shapes.clear()
    rollout = generated(trainer, 4)
    assert shapes[0] == (4, int(rollout.prompt_lengths_B.max()))
    assert len(shapes) == int(rollout.completion_lengths_B.max()) and set(shapes[1:]) == {(4, 1)}


def test_chunks_of_prompts_give_valid_completions_in_order(tmp_path: Path) -> None:
    """Five prompts two at a time: no pass reads more rows, and each completion continues its own prompt."""
    model = make_model()
    shapes = widths_while_generating(model)
    prompts = [*PROMPTS, [30, 31], [32]]
    completions = sample(make_engine(tmp_path, per_device_rollout_batch_size=2), model, prompts)
    assert [shape for shape in shapes if shape[1] > 1 or shape == (1, 1)][:1] == [(2, 9)]
    assert {shape[0] for shape in shapes} == {2, 1} and len(completions) == 5
    torch.testing.assert_close(noted(completions), scores(model, prompts, completions), atol=1e-4, rtol=0)


def test_the_default_chunk_is_one_optimizer_step(tmp_path: Path) -> None:
    """Four sequences a micro-batch times two micro-batches, also where a rollout serves several steps."""
    engine = make_engine(tmp_path, gradient_accumulation_steps=2, num_substeps=3)
    model = make_model()
    shapes = widths_while_generating(model)
    sample(engine, model, [[5, 6]] * 24)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 2)] * 3  # each chunk reads the prompt once
    assert max(shape[0] for shape in shapes) == 8


def test_completions_of_one_prompt_differ_and_a_seed_repeats(tmp_path: Path) -> None:
    engine, model = make_engine(tmp_path), make_model(initializer_range=0.05)
    first, again, other = (sample(engine, model, [[5, 6]] * 4, seed) for seed in (0, 0, 1))
    assert len({tuple(completion.ids) for completion in first}) == 4
    assert first == again and first != other


def test_groups_are_rolled_out_independently(tmp_path: Path) -> None:
    """Two prompts with four completions each, in the order of the rows; another step or process draws others."""
    trainer = make_trainer(
        tmp_path, num_generations=4, per_device_train_batch_size=8, model=make_model(initializer_range=0.05)
    )
    rows = [row for row in make_dataset(2) for _ in range(4)]
    rollout, again, later = (trainer.rollout_and_scores(rows, *stream)[0] for stream in ((0, 0), (0, 0), (0, 1)))
    for group in (slice(0, 4), slice(4, 8)):
        assert len(set(map(tuple, rollout.completion_ids()[group]))) == 4
        assert len({row["prompt"] for row in rollout.rows[group]}) == 1
    assert rollout.completion_ids() == again.completion_ids() != later.completion_ids()
    assert torch.equal(rollout.sampled_logps_BT, again.sampled_logps_BT)


# ---- What is left behind


def test_base_weights_are_bit_identical_after_a_hundred_rollouts(tmp_path: Path) -> None:
    """A bf16 base with an adapter, which merging and unmerging would change in a fifth of its values."""
    model = adapted(make_model(dtype=torch.bfloat16, num_hidden_layers=1))
    before = weights(model)
    engine = make_engine(tmp_path, max_completion_length=1)
    for seed in range(100):
        sample(engine, model, [[5]], seed)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_every_module_keeps_its_mode(tmp_path: Path) -> None:
    """A student in train mode with one layer in eval mode; gradients stay on, none is left on a weight."""
    model = make_model().train()
    model.get_submodule("model.layers.1").eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    inside: list[bool] = []
    model.get_submodule("model.layers.0").register_forward_pre_hook(lambda module, _: inside.append(module.training))
    sample(make_engine(tmp_path), model, PROMPTS)
    assert [module.training for module in model.modules()] == modes and set(inside) == {False}
    assert torch.is_grad_enabled() and all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_rollout_leaves_the_random_state_as_it_was(tmp_path: Path) -> None:
    """Python's, NumPy's and torch's, also after an error."""
    trainer = make_trainer(tmp_path)

    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def reset() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    reset()
    expected = draws()
    reset()
    trainer.rollout_and_scores(list(make_dataset(4)), 0)
    assert draws() == expected
    reset()
    with pytest.raises(ValueError, match="prompt"):
        trainer.rollout_and_scores([{"text": "no prompt"}], 0)
    assert draws() == expected


def test_random_streams_do_not_meet() -> None:
    """Every (seed, stream, step, process) has its own, and order counts."""

    def first(*seed: int) -> float:
        with forked_rng(*seed):
            return float(torch.rand((), dtype=torch.float64))

    seeds = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 2, 1), (0, 0, 1, 2)]
    assert len({first(*seed) for seed in seeds}) == len(seeds)
    assert first(0, 0, 1, 2) == first(0, 0, 1, 2)


def test_prompts_are_not_written_to(tmp_path: Path) -> None:
    prompts = copy.deepcopy(PROMPTS)
    sample(make_engine(tmp_path), make_model(), prompts)
    assert prompts == PROMPTS
