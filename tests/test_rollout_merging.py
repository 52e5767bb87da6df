"""Adapters merged while completions are sampled: the same policy, and the weights bit for bit as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from trl_opd.rollout import merging
from trl_opd.rollout.merging import merged

from .helpers import lora, make_model, weights
from .test_rollout import PROMPTS, make_engine, noted, sample, scores

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def adapted(base: Any = None, **settings: Any) -> Any:
    """With an adapter that changes much."""
    torch.manual_seed(3)
    return get_peft_model(base or make_model(), lora(init_lora_weights=False, **settings)).eval()


def mergeable(model: nn.Module) -> list[Any]:
    """The layers that can be merged, of peft's types, which say too little."""
    return list(merging.mergeable(model))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in model.named_parameters()}


@DTYPES
def test_weights_are_the_same_tensors_after_a_thousand_rollouts(dtype: torch.dtype) -> None:
    """Adding and subtracting would change a fifth of a bf16 base; fp32 too, by 4e-9."""
    model = adapted(make_model(dtype=dtype, num_hidden_layers=1))
    before, where = weights(model), pointers(model)
    for _ in range(1000):
        with merged(model):
            pass
    assert pointers(model) == where
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not any(layer.merged for layer in mergeable(model)) and mergeable(model)


def test_an_error_in_the_middle_leaves_nothing_merged(tmp_path: Path) -> None:
    """Of the rollout, and of merging itself: the last adapter has a shape that does not fit."""
    model = adapted()
    before, where, layers = weights(model), pointers(model), len(mergeable(model))
    with pytest.raises(IndexError):
        make_engine(tmp_path).generate(model, [[5, 1000]])
    broken = mergeable(model)[-1].lora_B["default"]
    whole = broken.weight.data
    broken.weight.data = whole[:, :1]
    with pytest.raises(RuntimeError), merged(model):
        pass
    broken.weight.data = whole
    assert pointers(model) == where and len(mergeable(model)) == layers
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_merged_weights_are_the_sum_rounded_once() -> None:
    """Worked out in float64: base + alpha/r × B A, for a bf16 base with adapters in bf16 and in fp32."""
    for adapter_dtype in (torch.bfloat16, torch.float32):
        model = adapted(make_model(dtype=torch.bfloat16))
        layer = mergeable(model)[0]
        for part in (layer.lora_A, layer.lora_B):
            part.to(adapter_dtype)
        base = layer.get_base_layer()
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        expected = base.weight.double() + 8 / 4 * b @ a
        with merged(model), torch.no_grad():
            assert base.weight.dtype == torch.bfloat16
            # bit for bit, but for sums in fp32 that fall on the other side of the middle between two
            assert (base.weight == expected.to(torch.bfloat16)).double().mean() > 0.99


def test_autocast_does_not_round_the_sum() -> None:
    model = adapted()
    layer = mergeable(model)[0]
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    expected = layer.get_base_layer().weight + 2 * b @ a
    with torch.autocast("cpu", torch.bfloat16), merged(model):
        torch.testing.assert_close(layer.get_base_layer().weight, expected, atol=1e-6, rtol=1e-6)


def test_several_active_adapters_are_added_and_others_are_not() -> None:
    model = adapted()
    for name in ("second", "idle"):
        model.add_adapter(name, lora(init_lora_weights=False, r=2))
    model.base_model.set_adapter(["default", "second"])
    expected = logits(model)
    with merged(model):
        assert all(layer.merged for layer in model.modules() if type(layer).__name__ == "LoraLinear")
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-5)
    model.base_model.set_adapter(["default", "second", "idle"])
    assert (logits(model) - expected).abs().max() > 0.1


def test_conv1d_weights_stand_the_other_way_round() -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=43, n_embd=16, n_layer=1, n_head=2, n_positions=32, initializer_range=0.4))
    model = adapted(base, target_modules=["c_attn", "c_fc"])
    expected = logits(model)
    assert len(mergeable(model)) == 2
    with merged(model):
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-5)


# ---- Left as they are


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_of_lora_are_not_merged(settings: dict[str, Any]) -> None:
    base = make_model(attention_bias=True, mlp_bias=True)
    model = adapted(base, target_modules=["q_proj", "up_proj"], **settings)
    expected = logits(model)
    with merged(model):
        assert torch.equal(logits(model), expected)
    assert not mergeable(model)


def test_another_kind_of_adapter_is_not_merged() -> None:
    model: Any = get_peft_model(
        make_model(), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    )
    assert not mergeable(model)
    with merged(model):
        pass


def test_an_output_layer_that_is_also_the_embedding_is_not_merged() -> None:
    """The others are. Were it merged, the embedding would be another."""
    base: Any = make_model(tie_word_embeddings=True)
    model = adapted(base, target_modules=["q_proj", "lm_head"])
    head: Any = base.get_output_embeddings()
    assert head.get_base_layer().weight is base.get_input_embeddings().weight
    expected = logits(model)
    with merged(model):
        assert not head.merged and len([m for m in model.modules() if vars(m).get("merged_adapters")]) == 2
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-5)


def test_adapters_that_are_disabled_or_merged_by_others_stay_so() -> None:
    model = adapted()
    with model.disable_adapter():
        expected = logits(model)
        with merged(model):
            assert torch.equal(logits(model), expected)
    model.merge_adapter()
    before = weights(model)
    with merged(model):
        pass
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert model.base_model.model.model.layers[0].mlp.up_proj.merged


def test_quantised_and_sharded_weights_are_not_merged() -> None:
    """What such a weight is: a subclass of nn.Linear, a tensor of another class, integers, or nowhere."""

    class Packed(nn.Linear):
        """As bitsandbytes' layers are."""

    class Part(Tensor):
        """As DTensor is."""

    def layer() -> tuple[Any, Any]:
        model = adapted(target_modules=["up_proj"], layers_to_transform=[0])
        (only,) = mergeable(model)
        return model, only.get_base_layer()

    model, base = layer()
    base.__class__ = Packed
    assert not mergeable(model)
    model, base = layer()
    base.weight = nn.Parameter(base.weight.data.as_subclass(Part), requires_grad=False)
    assert not mergeable(model)
    model, base = layer()
    base.weight = nn.Parameter(base.weight.data.to(torch.int8), requires_grad=False)
    assert not mergeable(model)
    model, _ = layer()
    assert not mergeable(model.to("meta"))


# ---- The policy


def test_rollouts_are_those_of_unmerged_weights(tmp_path: Path) -> None:
    """Merging is seen to happen; tokens are the same as where each layer's adapter was added by hand, log-probs to 1e-4."""
    model = adapted()
    inside: list[int] = []
    layer = mergeable(model)[0]
    layer.register_forward_pre_hook(lambda module, _: inside.append(len(module.merged_adapters)))
    completions = sample(make_engine(tmp_path), model, PROMPTS)
    assert set(inside) == {1}
    torch.testing.assert_close(noted(completions), scores(model, PROMPTS, completions), atol=1e-4, rtol=0)
    by_hand: Any = make_model()
    for own, other in zip(
        [m for m in by_hand.modules() if type(m) is nn.Linear][:-1], mergeable(model), strict=True
    ):  # all but the head
        a, b = other.lora_A["default"].weight, other.lora_B["default"].weight
        own.weight.data += 2 * (b @ a).detach()
    plain = sample(make_engine(tmp_path), by_hand, PROMPTS)
    assert [c.ids for c in plain] == [c.ids for c in completions]
    torch.testing.assert_close(noted(plain), noted(completions), atol=1e-5, rtol=1e-5)
