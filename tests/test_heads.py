"""Log-probs from hidden states in chunks: values, gradients and memory, against whole logits and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from trl_opd import DistillationWarning, token_logps
from trl_opd.heads import CHUNK_ELEMENTS, score_hidden, score_linear, zeros_after
from trl_opd.last_layer import known_head
from trl_opd.linear_head import LogitRule, Policy
from trl_opd.logprobs import score_in_batches, score_tokens

from .helpers import lora, make_model, make_trainer
from .test_architectures import build
from .test_logprobs import VARIANTS

N, H, V = 7, 5, 11
RULES = {
    "none": LogitRule(),
    "times": LogitRule(times=0.3),
    "over": LogitRule(over=3.0),
    "cap": LogitRule(cap=2.0),
    "times and cap": LogitRule(times=1.5, cap=2.0),
}
CHUNKS = {"one row": 1, "two rows": 2 * V + 1, "one less": (N - 1) * V, "all": N * V, "room for more": N * V + V}


def head_of(seed: int = 0, *, bias: bool = True, trained: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Hidden states that need a gradient, ids, weight and bias."""
    torch.manual_seed(seed)
    hidden = torch.randn(N, H, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype).requires_grad_(trained)
    return hidden, torch.randint(V - 2, (N,)), weight, torch.randn(V, dtype=dtype).requires_grad_(trained) if bias else None


def textbook(
    logits: Tensor, ids: Tensor, rule: LogitRule, temperature: float, vocab_size: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by `log_softmax`, the rule written out."""
    logits = logits * rule.times / rule.over
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    logps = torch.log_softmax(logits[:, :vocab_size] / temperature, dim=-1)
    return logps[torch.arange(len(ids)), ids], -(logps.exp() * logps).sum(dim=-1)


def gradients(value: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Of a sum in which each value has another weight."""
    weight = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view_as(value)
    needed = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return list(torch.autograd.grad((value * weight).sum(), needed))


# ---- A head


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("bias", "trained"), list(product([False, True], [False, True])))
def test_values_and_gradients_are_those_of_whole_logits(rule: str, bias: bool, trained: bool) -> None:
    """In float64, for each size of chunk, at two temperatures, with and without rows cut off."""
    hidden, ids, weight, bias_V = head_of(bias=bias, trained=trained)
    for (temperature, vocab_size), elements in product([(1.0, None), (0.7, V - 2)], CHUNKS.values()):
        expected, entropy = textbook(F.linear(hidden, weight, bias_V), ids, RULES[rule], temperature, vocab_size)
        policy = Policy(temperature, vocab_size, RULES[rule])
        found = score_linear(hidden, ids, weight, bias_V, policy, entropy=True, chunk_elements=elements)
        torch.testing.assert_close(found, (expected, entropy.detach()), atol=1e-12, rtol=0)
        assert not found[1].requires_grad
        for mine, theirs in zip(
            gradients(found[0], hidden, weight, bias_V), gradients(expected, hidden, weight, bias_V), strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule: str, trained: bool) -> None:
    """Against finite differences."""
    hidden, ids, weight, bias = head_of(1, trained=trained)
    policy = Policy(0.8, V - 1, RULES[rule])

    def logps(*tensors: Tensor) -> Tensor:
        return score_linear(tensors[0], ids, tensors[1], tensors[2], policy, entropy=False, chunk_elements=2 * V)[0]

    # a second backward pass computes again what the first has used up: to rounding the same
    assert torch.autograd.gradcheck(logps, (hidden, weight, bias), nondet_tol=1e-12)


@pytest.mark.parametrize("elements", CHUNKS.values(), ids=CHUNKS)
def test_any_function_can_be_the_head(elements: int) -> None:
    """A head that is no linear map; its parameters get the gradients that whole logits give them."""
    hidden, ids, _, _ = head_of()
    torch.manual_seed(2)
    head = nn.Sequential(nn.Linear(H, 4), nn.Tanh(), nn.Linear(4, V)).double()
    expected, entropy = textbook(head(hidden), ids, RULES["cap"], 0.7, V - 2)
    policy = Policy(0.7, V - 2, RULES["cap"])
    found = score_hidden(hidden, ids, head, policy, entropy=True, chunk_elements=elements)
    torch.testing.assert_close(found, (expected, entropy.detach()), atol=1e-12, rtol=0)
    for mine, theirs in zip(
        gradients(found[0], hidden, *head.parameters()), gradients(expected, hidden, *head.parameters()), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["linear", "function"])
def test_no_token_at_all(kind: str, trained: bool) -> None:
    """Gradients of zero, not None: DDP and FSDP wait for each parameter's."""
    hidden, ids, weight, bias = head_of(trained=trained)
    if kind == "linear":
        logps, entropy = score_linear(hidden[:0], ids[:0], weight, bias, Policy(), entropy=True)
    else:
        logps, entropy = score_hidden(hidden[:0], ids[:0], lambda h: F.linear(h, weight, bias), Policy(), entropy=True)
    assert logps.shape == entropy.shape == (0,)
    zeros_after(logps, (1,), hidden.dtype).sum().backward()
    assert all(tensor.grad.eq(0).all() for tensor in (hidden, weight, bias) if tensor.requires_grad)


def test_only_what_needs_a_gradient_gets_one() -> None:
    """A head trained on fixed hidden states; a bias alone."""
    hidden, ids, weight, bias = head_of()
    for needed in ((weight, bias), (bias,), (weight,)):
        for tensor in (hidden, weight, bias):
            tensor.requires_grad_(any(tensor is one for one in needed))
        found = gradients(score_linear(hidden, ids, weight, bias, Policy(), entropy=False)[0], *needed)
        expected = gradients(textbook(F.linear(hidden, weight, bias), ids, LogitRule(), 1.0, None)[0], *needed)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_token_that_is_ruled_out(trained: bool) -> None:
    """A bias of -inf: its log-prob is -inf, the entropy and all gradients of other tokens are finite."""
    hidden, ids, weight, bias = head_of(trained=trained)
    with torch.no_grad():
        bias[V - 1] = -math.inf
    found, entropy = score_linear(hidden, ids, weight, bias, Policy(), entropy=True)
    expected, _ = textbook(F.linear(hidden, weight[:-1], bias[:-1]), ids, LogitRule(), 1.0, None)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert entropy.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(found, hidden, weight, bias) if gradient is not None)
    gone = score_linear(hidden, torch.full_like(ids, V - 1), weight, bias, Policy(), entropy=True)[0]
    assert gone.eq(-math.inf).all()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rule", ["none", "times", "cap"])
@pytest.mark.parametrize("how", ["bf16 weights", "autocast"])
def test_precision_is_that_of_the_models_own_logits(how: str, rule: str, trained: bool) -> None:
    """Logits rounded to bf16, all else in fp32; gradients as autograd rounds them, at most a hundredth of the greatest off."""
    dtype = torch.bfloat16 if how == "bf16 weights" else torch.float32
    hidden, ids, weight, bias = head_of(3, trained=trained, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else nullcontext():
        own = RULES[rule](F.linear(hidden, weight, bias))
        found, _ = score_linear(hidden, ids, weight, bias, Policy(0.7, None, RULES[rule]), entropy=False)
    assert own.dtype == torch.bfloat16 and found.dtype == torch.float32
    expected, _ = textbook(own.float(), ids, LogitRule(), 0.7, None)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    for mine, theirs in zip(gradients(found, hidden, weight, bias), gradients(expected, hidden, weight, bias), strict=True):
        assert mine is not None and theirs is not None and mine.dtype == theirs.dtype == dtype
        assert (mine - theirs).abs().max() < 0.01 * theirs.abs().max()


def test_many_small_gradients_of_a_bf16_head_are_not_lost() -> None:
    """1,024 equal terms, a chunk each: added up in bf16, 256 of them would make the rest vanish."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    score_linear(hidden, torch.zeros(1024, dtype=torch.long), weight, None, Policy(), entropy=False, chunk_elements=2)[
        0
    ].sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [512.0, -512.0]


# ---- A model


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("kind", ["frozen", "trained", "adapter on it", "without gradient"])
def test_no_tensor_of_tokens_times_vocabulary_exists(kind: str) -> None:
    """Of 4 x 256 tokens and 2^16 ids, in forward and backward pass, or kept for it; whole logits would be twice a chunk."""
    vocab_size = 2**16
    model: Any = make_model(vocab_size=vocab_size, max_position_embeddings=256, num_hidden_layers=1)
    if kind != "trained":
        model = get_peft_model(model, lora(target_modules=["q_proj", *(["lm_head"] if kind == "adapter on it" else [])]))
    ids = torch.randint(vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
    assert ids.numel() * vocab_size == 2 * CHUNK_ELEMENTS
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if kind == "without gradient":
            score_in_batches(model, ids, torch.ones_like(ids), temperature=0.9, vocab_size=vocab_size, batch_size=4)
        else:
            score_tokens(model, ids, torch.ones_like(ids))[0].sum().backward()
    assert largest.elements <= CHUNK_ELEMENTS and sum(kept.values()) < CHUNK_ELEMENTS / 4


def wanted_case() -> tuple[Tensor, Tensor, Tensor]:
    """Padding on either side; wanted tokens with gaps, a first one, padding, a row with none."""
    ids = torch.randint(43, (4, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, 6:], mask[1, :3], mask[3, 5:] = 0, 0, 0
    wanted = torch.rand(4, 9, generator=torch.Generator().manual_seed(5)) < 0.5
    wanted[0, 0], wanted[0, 7], wanted[1, 1], wanted[2] = True, True, True, False
    return ids, mask, wanted


def capped() -> PreTrainedModel:
    """Gemma 2 with a cap that bends most logits; its window, if wholly padding, gives NaN in float64 (transformers' own)."""
    return build("gemma2", sliding_window=64)


MODELS: dict[str, Callable[[], Any]] = {
    **VARIANTS,
    "cap": capped,
    "scale": lambda: build("cohere"),
    "division": lambda: build("granite"),
    "LoRA, head frozen": lambda: get_peft_model(make_model(), lora(init_lora_weights=False)),
    "LoRA on lm_head": lambda: get_peft_model(
        make_model(), lora(init_lora_weights=False, target_modules=["q_proj", "lm_head"])
    ),
    "modules_to_save": lambda: get_peft_model(make_model(), lora(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "cap, LoRA on lm_head": lambda: get_peft_model(
        capped(), lora(init_lora_weights=False, target_modules=["q_proj", "lm_head"])
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_wanted_tokens_of_a_model(kind: str) -> None:
    """Values, entropies and every parameter's gradient, against the model's own logits of each row alone."""
    model = MODELS[kind]().double()
    ids, mask, wanted = wanted_case()
    logps, entropy = score_tokens(model, ids, mask, wanted, temperature=0.7, vocab_size=43)
    assert known_head(model, ids[:1]) is not None, "not in chunks"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = gradients(logps, *trained)
    expected, expected_entropy = torch.zeros_like(logps), torch.zeros_like(logps)
    for row, real in enumerate(mask.bool()):
        own = model(input_ids=ids[row][real][None], use_cache=False).logits[0, :-1, :43] / 0.7
        all_logps = own.log_softmax(dim=-1)
        places = real.nonzero().flatten()[1:]
        chosen = all_logps[torch.arange(len(places)), ids[row, places]]
        wanted_here = wanted[row, places]
        expected[row, places[wanted_here]] = chosen[wanted_here]
        expected_entropy[row, places[wanted_here]] = -(all_logps.exp() * all_logps).sum(dim=-1)[wanted_here].detach()
    torch.testing.assert_close(logps, expected, atol=1e-6, rtol=0)  # some architectures normalise in fp32
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-6, rtol=0)
    assert (logps != 0).sum() == (wanted & mask.bool())[:, 1:].sum() - int(wanted[1, 3])  # firsts and padding are not scored
    for mine, theirs in zip(found, gradients(expected, *trained), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "tied", "LoRA, head frozen", "LoRA on lm_head", "modules_to_save"])
def test_a_micro_batch_without_wanted_tokens(kind: str) -> None:
    """All zeros; each trained parameter has a gradient, of zero."""
    model = MODELS[kind]()
    ids, mask, wanted = wanted_case()
    logps, entropy = score_tokens(model, ids, mask, torch.zeros_like(wanted))
    assert logps.eq(0).all() and entropy.eq(0).all()
    logps.sum().backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and parameter.grad.eq(0).all()), name


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("kind", ["plain", "LoRA, head frozen", "LoRA on lm_head"])
def test_activation_checkpointing_changes_no_gradient(kind: str, checkpointing: dict[str, bool]) -> None:
    ids, mask, wanted = wanted_case()
    found = []
    for settings in (None, checkpointing):
        model = MODELS[kind]().train()
        if settings:
            model.enable_input_require_grads()
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        token_logps(model, ids, mask, wanted_mask=wanted).sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_the_head_is_as_before_also_after_an_error() -> None:
    """The next forward pass gives logits again."""
    model, ids = make_model(), torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    token_logps(model, ids, torch.ones_like(ids))
    assert "forward" not in vars(model.lm_head) and torch.equal(model(input_ids=ids).logits, before)
    for wrong_ids in (torch.tensor([[5, 9999, 7]]), torch.tensor([[5, 6, 42]])):
        with pytest.raises((IndexError, RuntimeError)):
            token_logps(model, wrong_ids, torch.ones_like(ids), vocab_size=42)  # no such embedding; no such id in the policy
        assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_forward_of_the_heads_own_is_kept() -> None:
    """As accelerate's hooks for offloaded weights have: it computes the logits, and it is put back."""
    model, ids = make_model(), torch.tensor([[5, 6, 7]])
    plain = model.lm_head.forward
    model.lm_head.forward = own = lambda hidden: 2 * plain(hidden)
    expected = model(input_ids=ids).logits.log_softmax(dim=-1)[0, [0, 1], ids[0, 1:]]
    torch.testing.assert_close(token_logps(model, ids, torch.ones_like(ids))[0, 1:], expected)
    assert model.lm_head.forward is own


# ---- Models whose logits are not known


def with_hook(hook: Callable[..., Any]) -> PreTrainedModel:
    """A Llama with a hook on its head, of which no configuration tells."""
    model = make_model()
    model.lm_head.register_forward_hook(hook)
    return model


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "shifted logits": (lambda: with_hook(lambda module, args, logits: logits + torch.arange(43) / 10), "does more to its"),
    "ruled out tokens": (
        lambda: with_hook(lambda module, args, logits: logits.index_fill(-1, torch.tensor([0]), -math.inf)),
        "does more to its",
    ),
    "called twice": (lambda: with_hook(lambda module, args, logits: module.forward(args[0]) + logits), "but 2 times"),
    "compiled": (lambda: torch.compile(make_model(), backend="eager"), "is compiled as a whole"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_that_is_not_understood_is_scored_by_its_own_logits(kind: str) -> None:
    """It is said once; values, gradients and the wanted tokens are right."""
    make, says = UNKNOWN[kind]
    model = make()
    ids, mask, wanted = wanted_case()
    mask[:] = 1
    with pytest.warns(DistillationWarning, match=says):
        logps = token_logps(model, ids, mask, wanted_mask=wanted)
    wanted[:, 0] = False
    expected = model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected = torch.where(wanted[:, 1:], expected, 0.0)
    torch.testing.assert_close(token_logps(model, ids, mask, wanted_mask=wanted)[:, 1:], expected)
    trained = list(model.parameters())
    for mine, theirs in zip(gradients(logps[:, 1:], *trained), gradients(expected, *trained), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_model_that_was_scored_before_it_is_compiled() -> None:
    """As where it is its own teacher: what is known of it holds for the call without compilation."""
    model = make_model()
    ids, mask, _ = wanted_case()
    mask[:] = 1
    expected = token_logps(model, ids, mask)
    with pytest.warns(DistillationWarning, match="is compiled as a whole"):
        found = token_logps(torch.compile(model, backend="eager"), ids, mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("zero_head", [False, True])
def test_a_cap_is_noticed_however_small_the_logits_are(zero_head: bool) -> None:
    """A head of zeros, or tiny: the cap changes nothing now, and much once the head is trained."""
    model = capped()
    trained = model.lm_head.weight.detach().clone()
    ids, mask, _ = wanted_case()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.0 if zero_head else 1e-4)
        token_logps(model, ids, mask)
        model.lm_head.weight.copy_(trained)
    _, rule = known_head(model, ids[:1]) or (None, None)
    assert rule == LogitRule(cap=2.0)


def test_dispatch_mode_sees_whole_logits() -> None:
    """The measure itself: a model that is not understood does make a tensor of tokens x vocabulary."""
    model = with_hook(lambda module, args, logits: logits + torch.arange(43) / 10)
    ids = torch.randint(43, (2, 50), generator=torch.Generator().manual_seed(0))
    with pytest.warns(DistillationWarning), LargestTensor() as largest:
        token_logps(model, ids, torch.ones_like(ids))
    assert largest.elements >= ids.numel() * 43


@pytest.mark.parametrize("kind", ["model", "base"])
def test_student_and_teacher_are_scored_at_the_completions_only(tmp_path: Path, kind: str) -> None:
    """A prompt has no values, whichever the teacher reads; each completion token has one of each."""
    settings: dict[str, Any] = {"teacher_model": make_model(1)}
    if kind == "base":
        settings = {"teacher_model": "base", "peft_config": lora(init_lora_weights=False)}
    trainer = make_trainer(tmp_path, **settings)
    rows = [{"prompt": "12+3=", "teacher_prompt": "a longer one 12+3="}, {"prompt": "1+1=", "teacher_prompt": "1"}]
    for given in (rows, [{"prompt": row["prompt"]} for row in rows]):
        batch = trainer.scored_batch(given)
        _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        for values_BT in (outputs["logps"], batch.teacher_logps_BT, trainer.student_logps(batch)):
            assert torch.equal(values_BT != 0, batch.mask_BT)
