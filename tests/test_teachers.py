"""Teachers: frozen, used, the right ones, at the student's temperature, and in no second copy where they share its base."""

from __future__ import annotations

import gc
import warnings as python_warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trl_opd import DistillationWarning
from trl_opd.batch import Completion, Rollout
from trl_opd.models import TEACHER_ADAPTER
from trl_opd.teachers import AdapterTeacher, ModelTeacher

from .helpers import lora, losses, make_model, make_tokenizer, make_trainer, save_model, weights

WEIGHTS = "adapter_model.safetensors"


def make_rollout(ids: list[list[int]] | None = None) -> Rollout:
    """Two prompts of 3 and 5 tokens with completions of 4 and 2, or the given completions."""
    prompts = [[5, 14, 6], [7, 8, 14, 9, 15]]
    completions = [Completion(c, [-1.0] * len(c), stopped=c[-1] == 1) for c in ids or [[20, 21, 22, 1], [30, 31]]]
    return Rollout.build(prompts, completions, [{"prompt": "a"}, {"prompt": "b"}], pad_id=0, device=torch.device("cpu"))


def score_by_hand(model: Any, rollout: Rollout, temperature: float = 1.0, vocab_size: int = 43) -> Tensor:
    """Log-probs of the completions, row by row, without padding: plain softmax of the model's logits."""
    expected_BT = torch.zeros(rollout.ids_BT.shape)
    with torch.no_grad():
        for row, (ids, start) in enumerate(zip(rollout.ids_BT, rollout.prompt_lengths_B.tolist(), strict=True)):
            end = start + int(rollout.completion_lengths_B[row])
            logits = model(input_ids=ids[None, :end]).logits[0, :, :vocab_size].float() / temperature
            expected_BT[row, start:end] = logits.log_softmax(dim=-1)[start - 1 : end - 1].gather(1, ids[start:end, None])[:, 0]
    return expected_BT


def assert_scores(trainer: Any, model: Any, **settings: Any) -> None:
    """The trainer's teacher scores as `model` does."""
    rollout = make_rollout()
    found_BT = trainer.score_with_teacher(rollout)
    expected_BT = score_by_hand(model, rollout, **settings)
    torch.testing.assert_close(torch.where(rollout.mask_BT, found_BT, 0.0), expected_BT, atol=1e-5, rtol=1e-5)


def perturbed(model: PeftModel, seed: int) -> PeftModel:
    """The same model with an adapter that does something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save_adapter(folder: Path, base: str, seed: int, config: PeftConfig | None = None) -> str:
    """A trained adapter of the model in `base`, on disk."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config or lora())
    perturbed(model, seed).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A base model on disk."""
    return save_model(tmp_path / "base", make_model(0))


# ---- Frozen


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_teacher_is_in_eval_mode_frozen_and_unchanged(tmp_path: Path, kind: str) -> None:
    """It is passed in train mode with dropout 0.5."""
    teacher: Any = make_model(1, attention_dropout=0.5)
    if kind == "adapter":
        teacher = perturbed(get_peft_model(teacher, lora(lora_dropout=0.5)), 3)
    teacher.train()
    trainer = make_trainer(tmp_path, teacher_model=teacher)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    rollout = make_rollout()
    first_BT = trainer.score_with_teacher(rollout)
    trainer.train()
    teacher.train()
    assert torch.equal(trainer.score_with_teacher(rollout), first_BT)
    teacher.eval()
    assert_scores(trainer, teacher)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in teacher.parameters()}


def test_scores_carry_no_gradient(tmp_path: Path) -> None:
    for settings in ({}, {"peft_config": lora(), "teacher_model": "base"}):
        trainer = make_trainer(tmp_path, **settings)  # type: ignore[arg-type]
        assert not trainer.score_with_teacher(make_rollout()).requires_grad


# ---- Used, and the one that was meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_that_is_the_students_equal_is_noticed(tmp_path: Path, dtype: torch.dtype) -> None:
    """As when a wrong path falls back to the student's base. Equal models differ by rounding in bf16; it must not hide it."""
    settings: dict[str, Any] = {"max_completion_length": 32, "per_device_train_batch_size": 8, "max_steps": 1}
    trainer = make_trainer(tmp_path, model=make_model(0, dtype=dtype), teacher_model=make_model(0, dtype=dtype), **settings)
    with pytest.warns(DistillationWarning, match=r"teacher_kl is .* scores as the student does. Is it the model you meant"):
        trainer.train()
    if dtype is torch.float32:
        assert abs(losses(trainer)[0]) < 1e-5
        assert trainer.state.log_history[0]["grad_norm"] < 1e-4


def test_fresh_adapter_with_its_base_for_teacher_is_noticed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, peft_config=lora(), teacher_model="base")
    with pytest.warns(DistillationWarning, match="scores as the student does"):
        trainer.train()


def test_another_teacher_is_not_warned_about(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=make_model(0, dtype=torch.bfloat16), teacher_model=make_model(1))
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error", DistillationWarning)
        trainer.train()


def test_another_teacher_changes_loss_and_gradient(tmp_path: Path) -> None:
    runs = [make_trainer(tmp_path, teacher_model=make_model(seed), max_steps=1) for seed in (1, 2)]
    for trainer in runs:
        trainer.train()
    one, other = (trainer.state.log_history[0] for trainer in runs)
    assert one["tokens"] == other["tokens"]  # the same rollouts
    for name in ("loss", "grad_norm", "teacher_kl"):
        assert abs(one[name] - other[name]) > 1e-2


def test_without_weight_the_teacher_changes_nothing(tmp_path: Path) -> None:
    """kl_penalty_coef 0 and rewards: the same run with either teacher, bit for bit."""
    settings: dict[str, Any] = {
        "kl_penalty_coef": 0.0,
        "num_generations": 4,
        "reward_funcs": lambda completions, **_: [float(len(text)) for text in completions],
    }
    runs = [make_trainer(tmp_path, teacher_model=make_model(seed), **settings) for seed in (1, 2)]
    for trainer in runs:
        trainer.train()
    one, other = (weights(trainer.model) for trainer in runs)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert not torch.equal(one["lm_head.weight"], weights(make_model(0))["lm_head.weight"])


@pytest.mark.parametrize("kind", ["model", "base"])
def test_teacher_is_scored_at_the_students_temperature(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"peft_config": lora(), "teacher_model": "base"} if kind == "base" else {}
    trainer = make_trainer(tmp_path, temperature=0.7, **settings)
    assert_scores(trainer, make_model(0 if kind == "base" else 1), temperature=0.7)


def test_padded_rows_of_the_teachers_head_have_no_part_in_its_softmax(tmp_path: Path) -> None:
    teacher = make_model(1, vocab_size=64)
    trainer = make_trainer(tmp_path, teacher_model=teacher)
    assert_scores(trainer, teacher, vocab_size=43)


# ---- The student's own base


def parameters_alive() -> int:
    """Elements of all parameters that exist in this process."""
    gc.collect()
    found = {id(o): o.numel() for o in gc.get_objects() if type(o) is nn.Parameter}
    return sum(found.values())


def test_base_as_teacher_takes_no_memory(tmp_path: Path) -> None:
    model = make_model(0)
    before = parameters_alive()
    trainer = make_trainer(tmp_path, model=model, peft_config=lora(), teacher_model="base")
    adapter = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert parameters_alive() - before == adapter
    assert isinstance(trainer.teacher, AdapterTeacher)


def test_base_scores_as_the_base_while_the_adapter_learns(tmp_path: Path) -> None:
    student = perturbed(get_peft_model(make_model(0), lora()), 4)
    trainer = make_trainer(tmp_path, model=student, teacher_model="base", max_steps=3)
    assert_scores(trainer, make_model(0))
    before = weights(trainer.model)
    trainer.train()
    assert_scores(trainer, make_model(0))
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert all(loss > 0 for loss in losses(trainer))


def student_state(model: PeftModel) -> tuple[Any, ...]:
    """What scoring must leave as it was."""
    return (
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
        model.active_adapters,
        model.active_adapter,
        model.get_model_status().enabled,
    )


@pytest.mark.parametrize("kind", ["base", "adapter"])
@pytest.mark.parametrize("mode", [True, False])
def test_student_is_as_before_after_scoring_and_after_an_error_in_it(tmp_path: Path, base: str, kind: str, mode: bool) -> None:
    teacher = "base" if kind == "base" else save_adapter(tmp_path / "teacher", base, 5)
    student = perturbed(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(lora_dropout=0.1)), 4)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("lora_B" in name)  # a user may train a part of the adapter
    trainer = make_trainer(tmp_path, model=student, teacher_model=teacher)
    student.train(mode)
    rollout = make_rollout()
    state, own_BT = student_state(student), trainer.student_logps(rollout)
    trainer.score_with_teacher(rollout)
    assert student_state(student) == state
    with pytest.raises(IndexError):
        trainer.score_with_teacher(make_rollout([[20, 21, 22, 1], [30, 9999]]))  # no such embedding
    assert student_state(student) == state
    assert torch.equal(trainer.student_logps(rollout), own_BT)
    trained = {".".join(name.split(".")[-3:]) for name, p in student.named_parameters() if p.requires_grad}
    assert trained == {"lora_B.default.weight"}


def test_several_active_adapters_stay_active(tmp_path: Path, base: str) -> None:
    """A student may be the sum of two adapters; scoring must not switch one of them off."""
    student = perturbed(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()), 4)
    student.add_adapter("second", lora())
    student.base_model.set_adapter(["default", "second"])  # type: ignore[operator]
    for teacher in ("base", save_adapter(tmp_path / "teacher", base, 5)):
        trainer = make_trainer(tmp_path, model=student, teacher_model=teacher)
        state = student_state(student)
        trainer.score_with_teacher(make_rollout())
        assert student_state(student) == state
        assert student.active_adapters == ["default", "second"]


# ---- An adapter as teacher


def test_adapter_on_its_own_base(tmp_path: Path, base: str) -> None:
    """For a student that has another base, or trains all its weights."""
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    trainer = make_trainer(tmp_path, model=make_model(3), teacher_model=adapter)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert isinstance(trainer.teacher, ModelTeacher)
    assert_scores(trainer, expected)
    trainer.train()
    assert_scores(trainer, expected)


def test_adapter_that_is_passed_as_a_model(tmp_path: Path, base: str) -> None:
    teacher = perturbed(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()), 5)
    trainer = make_trainer(tmp_path, model=base, peft_config=lora(), teacher_model=teacher)
    assert_scores(trainer, teacher)


def test_adapter_on_the_students_base(tmp_path: Path, base: str) -> None:
    """Two adapters, one base: the teacher's is frozen and unsaved, and the student's trains as beside a teacher of its own."""
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    before = parameters_alive()
    shared = make_trainer(tmp_path / "out", model=base, peft_config=lora(), teacher_model=adapter)
    trainable = {name for name, p in shared.model.named_parameters() if p.requires_grad}
    assert isinstance(shared.teacher, AdapterTeacher)
    assert trainable == {name for name, _ in shared.model.named_parameters() if "lora_" in name and ".default." in name}
    assert parameters_alive() - before == sum(p.numel() for p in shared.model.parameters())  # one base, two adapters
    assert_scores(shared, expected)

    teacher_weights = {name: w for name, w in weights(shared.model).items() if TEACHER_ADAPTER in name}
    shared.train()
    assert len(teacher_weights) == len(trainable)
    assert all(torch.equal(shared.model.get_parameter(name), weight) for name, weight in teacher_weights.items())
    assert {name for name, p in shared.model.named_parameters() if p.requires_grad} == trainable
    optimized = {id(p) for group in shared.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(shared.model.get_parameter(name)) for name in trainable}
    assert_scores(shared, expected)

    separate = make_trainer(tmp_path, model=base, peft_config=lora(), teacher_model=expected)
    separate.train()
    assert losses(shared) == pytest.approx(losses(separate), rel=1e-5)
    for name in trainable:
        torch.testing.assert_close(shared.model.get_parameter(name), separate.model.get_parameter(name))

    shared.save_model(str(tmp_path / "saved"))
    assert not any(path.is_dir() for path in (tmp_path / "saved").iterdir())
    assert not [key for key in load_file(tmp_path / "saved" / WEIGHTS) if TEACHER_ADAPTER in key]
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "saved"))
    rollout = make_rollout()
    expected_BT = score_by_hand(reloaded, rollout)
    torch.testing.assert_close(torch.where(rollout.mask_BT, shared.student_logps(rollout), 0.0), expected_BT)
    assert TEACHER_ADAPTER in shared.model.peft_config  # still there after saving


def test_adapter_is_not_put_on_a_base_that_may_have_changed(tmp_path: Path, base: str) -> None:
    """Merging leaves a model its name, but not its weights: the teacher's adapter belongs on the original."""
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    tuned = save_adapter(tmp_path / "tuned", base, 6)
    merged: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned).merge_and_unload()
    trainer = make_trainer(tmp_path / "out", model=merged, peft_config=lora(), teacher_model=adapter)
    assert_scores(trainer, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def test_checkpoints_hold_no_teacher_and_resume(tmp_path: Path, base: str) -> None:
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    settings: dict[str, Any] = {"model": base, "peft_config": lora(), "teacher_model": adapter, "max_steps": 3}
    whole = make_trainer(tmp_path / "out", save_strategy="steps", save_steps=1, **settings)
    whole.train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert not [key for key in load_file(checkpoint / WEIGHTS) if TEACHER_ADAPTER in key]
    assert not (checkpoint / TEACHER_ADAPTER).exists()
    resumed = make_trainer(tmp_path / "out", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed)[-2:] == losses(whole)[-2:]


def test_second_trainer_with_another_teacher_on_the_same_student(tmp_path: Path, base: str) -> None:
    """Two stages of one student: the first teacher's adapter makes room, an adapter that the user calls "teacher" does not."""
    first = save_adapter(tmp_path / "first", base, 5)
    second = save_adapter(tmp_path / "second", base, 6, lora(r=2))
    student = perturbed(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()), 4)
    student.add_adapter("teacher", lora())
    users = {name: w for name, w in weights(student).items() if ".teacher." in name}
    make_trainer(tmp_path, model=student, teacher_model=first)
    trainer = make_trainer(tmp_path, model=student, teacher_model=second)
    assert_scores(trainer, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), second))
    assert len(users) == 28
    assert all(torch.equal(student.get_parameter(name), weight) for name, weight in users.items())


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_modules_to_save_of_one_side_do_not_reach_the_other(tmp_path: Path, base: str, side: str) -> None:
    """One of the two adapters has an lm_head of its own, the other uses the base's."""
    with_head = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapter = save_adapter(tmp_path / "teacher", base, 5, with_head if side == "teacher" else lora())
    config = with_head if side == "student" else lora(target_modules=["q_proj", "v_proj"])
    own_adapter = save_adapter(tmp_path / "student", base, 4, config)
    rollout = make_rollout()
    own_BT = score_by_hand(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), own_adapter), rollout)
    trainer = make_trainer(tmp_path, model=own_adapter, teacher_model=adapter)
    student = trainer.student()
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert isinstance(trainer.teacher, AdapterTeacher)
    trainable = {name for name, p in student.named_parameters() if p.requires_grad}
    for _ in range(2):
        assert_scores(trainer, expected)
        torch.testing.assert_close(torch.where(rollout.mask_BT, trainer.student_logps(rollout), 0.0), own_BT)
    trainer.train()
    assert {name for name, p in student.named_parameters() if p.requires_grad} == trainable
    assert not [name for name in trainable if TEACHER_ADAPTER in name]
    assert_scores(trainer, expected)


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        lora(init_lora_weights="pissa"),
        lora(bias="all"),
    ],
    ids=["another kind", "PiSSA", "biases"],
)
def test_adapter_that_cannot_stand_beside_the_students_gets_a_base_of_its_own(tmp_path: Path, config: PeftConfig) -> None:
    """Put on the student's base, PiSSA would take a part out of the student."""
    base = save_model(tmp_path / "base", make_model(0, attention_bias=True))
    adapter = save_adapter(tmp_path / "teacher", base, 5, config)
    student = perturbed(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()), 4)
    before = weights(student)
    trainer = make_trainer(tmp_path, model=student, teacher_model=adapter)
    assert isinstance(trainer.teacher, ModelTeacher)
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())
    assert_scores(trainer, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def test_adapter_of_a_base_that_the_student_trains_gets_its_own(tmp_path: Path, base: str) -> None:
    """The student's biases or embeddings move; a teacher on them would move along."""
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    student = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    student.get_input_embeddings().requires_grad_(True)
    trainer = make_trainer(tmp_path, model=student, teacher_model=adapter)
    trainer.train()
    assert isinstance(trainer.teacher, ModelTeacher)
    assert_scores(trainer, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def spoil_adapter(folder: str, how: str) -> None:
    """Rewrites an adapter's file with keys under another prefix, or with half of them."""
    path = Path(folder) / WEIGHTS
    tensors = load_file(path)
    if how == "prefix":
        tensors = {key.replace("base_model.model.", "model.module."): tensor for key, tensor in tensors.items()}
    else:
        tensors = {key: tensor for key, tensor in tensors.items() if "layers.1" not in key}
    save_file(tensors, path)


@pytest.mark.parametrize(("how", "found"), [("prefix", "has no place for 28"), ("half", "got no weights for 14")])
@pytest.mark.parametrize("role", ["student", "teacher on its own base", "teacher on the student's base"])
def test_adapter_that_loads_nothing_is_an_error(tmp_path: Path, base: str, how: str, found: str, role: str) -> None:
    """peft warns at most, and the model goes on as its base."""
    adapter = save_adapter(tmp_path / "adapter", base, 5)
    spoil_adapter(adapter, how)
    settings: dict[str, Any] = {
        "student": {"model": adapter},
        "teacher on its own base": {"teacher_model": adapter},
        "teacher on the student's base": {"model": base, "peft_config": lora(), "teacher_model": adapter},
    }[role]
    with pytest.raises(ValueError, match=found) as raised:
        make_trainer(tmp_path, **settings)
    assert adapter in str(raised.value) and "lora_" in str(raised.value) and "another prefix" in str(raised.value)


def test_student_named_by_an_adapter_goes_on_training_it(tmp_path: Path, base: str) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, 5)
    trainer = make_trainer(tmp_path, model=adapter, processing_class=None, teacher_model="base")
    rollout = make_rollout()
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    found_BT = torch.where(rollout.mask_BT, trainer.student_logps(rollout), 0.0)
    torch.testing.assert_close(found_BT, score_by_hand(expected, rollout))
    assert_scores(trainer, make_model(0))
    before = weights(trainer.model)
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}


# ---- Loading


def test_dtype_of_the_teacher_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", make_model(1, dtype=torch.bfloat16))
    trainer = make_trainer(tmp_path, teacher_model=path)
    assert {p.dtype for p in trainer.teacher.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trainer.train()
    assert all(torch.tensor(losses(trainer)).isfinite())


def test_teacher_by_name_with_its_own_settings(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", make_model(1, dtype=torch.bfloat16))
    trainer = make_trainer(tmp_path, teacher_model=path, teacher_model_init_kwargs={"dtype": "float32"})
    assert {p.dtype for p in trainer.teacher.model.parameters()} == {torch.float32}


def test_loading_settings_give_an_adapter_a_base_of_its_own(tmp_path: Path, base: str) -> None:
    """A teacher in bf16 beside a student in fp32: they cannot share one base."""
    adapter = save_adapter(tmp_path / "teacher", base, 5)
    trainer = make_trainer(
        tmp_path, model=base, peft_config=lora(), teacher_model=adapter, teacher_model_init_kwargs={"dtype": "bfloat16"}
    )
    assert isinstance(trainer.teacher, ModelTeacher)
    assert trainer.teacher.model.dtype is torch.bfloat16


def test_teacher_from_the_settings(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", make_model(1))
    trainer = make_trainer(tmp_path, teacher_model=None, teacher_model_name_or_path=path)
    assert_scores(trainer, make_model(1))
    assert trainer.teacher_name == path
    base = make_trainer(tmp_path, teacher_model=None, teacher_model_name_or_path="base", peft_config=lora())
    assert_scores(base, make_model(0))


def test_teacher_of_the_constructor_goes_before_that_of_the_settings(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", make_model(1))
    trainer = make_trainer(tmp_path, teacher_model=make_model(2), teacher_model_name_or_path=path)
    assert_scores(trainer, make_model(2))


# ---- Stop tokens


def ending_with(*ids: int, tokenizer_eos: str = "<eos>", seed: int = 1) -> tuple[Any, Any]:
    """A model whose generation config ends with `ids`, and a tokenizer."""
    model, tokenizer = make_model(seed), make_tokenizer()
    model.config.eos_token_id = ids[0]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(ids)
    tokenizer.eos_token = tokenizer_eos
    return model, tokenizer


@pytest.mark.parametrize(
    ("teacher", "tells"),
    [
        ({"ids": [1]}, False),
        ({"ids": [1, 20]}, False),  # one more way to end, which the student need not know
        ({"ids": [20], "tokenizer_eos": "d"}, True),  # nothing in common
        (
            {"ids": [20, 1], "tokenizer_eos": "d"},
            True,
        ),  # a chat teacher that ends turns with a token that does not stop the student
    ],
)
def test_stop_tokens_that_do_not_match_are_told_before_training(tmp_path: Path, teacher: dict[str, Any], tells: bool) -> None:
    """Else the student learns never to stop: the teacher finds its stop token unlikely, or goes on where it stopped."""
    ids = teacher.pop("ids")
    path = save_model(tmp_path / "teacher", *ending_with(*ids, **teacher))
    with python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always")
        make_trainer(tmp_path, teacher_model=path)
    messages = [str(w.message) for w in caught if issubclass(w.category, DistillationWarning)]
    assert [("ends with ['<eos>']" in m and "'d'" in m and "never to stop" in m) for m in messages] == [True] * tells


def test_stop_tokens_of_a_teacher_in_memory(tmp_path: Path) -> None:
    with pytest.warns(DistillationWarning, match=r"one of the teacher with \['d'\]"):
        make_trainer(tmp_path, teacher_model=ending_with(20)[0])


def test_stop_token_of_the_student_that_the_teacher_never_writes(tmp_path: Path) -> None:
    """The student ends with a token that is no end to the teacher, though they have another in common."""
    model, tokenizer = ending_with(1, 20, tokenizer_eos="d", seed=0)
    path = save_model(tmp_path / "teacher", make_model(1))
    with pytest.warns(DistillationWarning, match="never to stop"):
        make_trainer(tmp_path, model=model, processing_class=tokenizer, teacher_model=path)
