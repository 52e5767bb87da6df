"""Several teachers: each row scored by its own, scores back in their places, each loaded once, adapters in no second copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_opd import DistillationWarning
from trl_opd.batch import Completion, Rollout
from trl_opd.models import TEACHER_ADAPTER
from trl_opd.servers import ServerError
from trl_opd.teachers import AdapterTeacher, ModelTeacher, OffloadedTeacher, RoutedTeacher, teachers_of

from .helpers import lora, losses, make_dataset, make_model, make_trainer, save_model, weights
from .test_errors import assert_error
from .test_mixing import prompts
from .test_teachers import WEIGHTS, parameters_alive, save_adapter, score_by_hand

X_AND_Y = ("x", "y", "y", "x", "y")


def rollout_of(*teachers: str, own_prompts: bool = False) -> Rollout:
    """A row for each name, all of different lengths."""
    ids = [[5 + (7 * row + 3 * t) % 30 for t in range(3 + row)] for row in range(len(teachers))]
    written = [[6 + (5 * row + t) % 30 for t in range(5 - row % 3)] for row in range(len(ids))]
    completions = [Completion(tokens, [-1.0] * len(tokens), False) for tokens in written]
    rows = [{"prompt": "a", "teacher": name} for name in teachers]
    seen = [[9] * (1 + 2 * row) for row in range(len(ids))] if own_prompts else None
    return Rollout.build(ids, completions, rows, pad_id=0, device=torch.device("cpu"), teacher_prompts=seen)


class Constant:
    """Scores every token of a row by a number and the row's first id, and notes what it was asked."""

    def __init__(self, number: float) -> None:
        self.number, self.asked = number, []

    def score(self, rollout: Rollout) -> Tensor:
        self.asked.append([row["teacher"] for row in rollout.rows])
        return (self.number + rollout.ids_BT[:, :1] / 100).expand(rollout.ids_BT.shape)


# ---- Routing


def test_each_row_is_scored_by_its_own_teacher_and_in_its_place() -> None:
    x, y = Constant(-1.0), Constant(-2.0)
    rollout = rollout_of(*X_AND_Y)
    scores_BT = RoutedTeacher({"x": x, "y": y}).score(rollout)
    first_ids = [5 + 7 * row for row in range(5)]
    expected = [number + first / 100 for number, first in zip([-1.0, -2.0, -2.0, -1.0, -2.0], first_ids, strict=True)]
    assert scores_BT[:, 0].tolist() == pytest.approx(expected)
    assert (x.asked, y.asked) == ([["x", "x"]], [["y", "y", "y"]])


@pytest.mark.parametrize("own_prompts", [False, True])
def test_scores_are_those_of_each_row_alone(own_prompts: bool) -> None:
    """By hand, row by row, without padding, after the teachers' own prompts where there are any."""
    models = {"x": make_model(1), "y": make_model(2)}
    scoring: dict[str, Any] = {"temperature": 1.0, "vocab_size": 43, "batch_size": 2}
    teacher = RoutedTeacher({name: ModelTeacher(m, **scoring) for name, m in models.items()})
    rollout = rollout_of(*X_AND_Y, own_prompts=own_prompts)
    scores_BT = teacher.score(rollout)
    for i, name in enumerate(X_AND_Y):
        start, length = int(rollout.prompt_lengths_B[i]), int(rollout.completion_lengths_B[i])
        prompt = [9] * (1 + 2 * i) if own_prompts else rollout.ids_BT[i, :start].tolist()
        ids = torch.tensor([*prompt, *rollout.completion_ids()[i]])
        with torch.no_grad():
            logps = models[name](input_ids=ids[None]).logits[0, :, :43].log_softmax(dim=-1)
        expected = [float(logps[len(prompt) + t - 1, ids[len(prompt) + t]]) for t in range(length)]
        assert scores_BT[i, start : start + length].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_name_that_is_no_teachers_is_told() -> None:
    teacher = RoutedTeacher({"x": Constant(-1.0)})
    assert_error(lambda: teacher.score(rollout_of("x", "z")), "['z']", "['x']")


def test_scores_of_another_shape_are_told() -> None:
    class Short(Constant):
        def score(self, rollout: Rollout) -> Tensor:
            return super().score(rollout)[:, 1:]

    teacher = RoutedTeacher({"x": Short(-1.0), "y": Constant(-1.0)})
    assert_error(lambda: teacher.score(rollout_of("y", "x")), "A teacher's scores of its rows", "(1, ")


def test_sharded_models_make_equally_many_passes_on_each_process() -> None:
    """This process has rows of y and none of x, of which others have some: it makes a pass of x with a stub."""
    passes: list[int] = []
    asked: list[list[int]] = []

    def model(name: str) -> PreTrainedModel:
        made = make_model(1)
        made.register_forward_hook(lambda *_: passes.append({"x": 0, "y": 1}[name]))
        return made

    def most(own: list[int]) -> list[int]:
        asked.append(own)
        return [1, 1]

    scoring: dict[str, Any] = {"temperature": 1.0, "vocab_size": 43, "batch_size": 2, "context": 16}
    teachers = {name: ModelTeacher(model(name), **scoring) for name in ("x", "y")}
    remote = Constant(-1.0)
    teacher = RoutedTeacher({**teachers, "z": remote}, most=lambda own: [*most(own[:2]), 1])
    rollout = rollout_of("y", "y", "y")
    teacher.score(rollout)  # the first passes of a model look at its head
    passes.clear()
    scores_BT = teacher.score(rollout)
    assert asked == [[0, 1]] * 2 and passes == [0, 1, 1]
    assert remote.asked == [], "a server takes part in no collective"
    expected_BT = teachers["y"].score(rollout)
    torch.testing.assert_close(scores_BT, expected_BT)


def test_servers_alone_take_part_in_no_collective() -> None:
    """One process, or another thread, may ask them while the others do something else."""

    def most(own: list[int]) -> list[int]:
        raise AssertionError("asked the other processes")

    x, y = Constant(-1.0), Constant(-2.0)
    RoutedTeacher({"x": x, "y": y}, most=most).score(rollout_of("x", "y"))
    assert x.asked == [["x"]] and y.asked == [["y"]]


def test_servers_are_asked_last() -> None:
    """If one is lost to this process, it has made the passes that the others wait for."""
    passes: list[str] = []
    model = make_model(1)
    model.register_forward_hook(lambda *_: passes.append("model"))

    class Lost(Constant):
        def score(self, rollout: Rollout) -> Tensor:
            raise ServerError("lost")

    here = ModelTeacher(model, temperature=1.0, vocab_size=43, batch_size=2, context=16)
    with pytest.raises(ServerError):
        RoutedTeacher({"x": Lost(-1.0), "y": here}).score(rollout_of("x", "y"))
    assert passes


# ---- Put together by the trainer


def two_datasets(number: int = 8) -> dict[str, datasets.Dataset]:
    return {"x": prompts("x", number), "y": prompts("y", number)}


def scored(trainer: Any, *names: str) -> Tensor:
    """The scores of rows that name these teachers, 0 off the completion."""
    rollout = rollout_of(*names)
    return torch.where(rollout.mask_BT, trainer.score_with_teacher(rollout), 0.0)


def test_a_model_for_each_dataset(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=two_datasets(), teacher_model={"x": make_model(1), "y": make_model(2)})
    found_BT = scored(trainer, "x", "y")
    expected = [score_by_hand(make_model(seed), rollout_of("x", "y"))[i] for i, seed in enumerate((1, 2))]
    torch.testing.assert_close(found_BT, torch.stack(expected), atol=1e-5, rtol=1e-5)
    trainer.train()
    kls = [trainer.state.log_history[0][f"teacher_kl/{name}"] for name in ("x", "y")]
    assert kls[0] != kls[1]


def test_the_same_teacher_twice_is_loaded_once_and_asked_once(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", make_model(1))
    before = parameters_alive()
    student = make_model(0)
    own = sum(p.numel() for p in student.parameters())
    trainer = make_trainer(tmp_path, model=student, train_dataset=two_datasets(), teacher_model={"x": path, "y": path})
    assert parameters_alive() - before == 2 * own
    assert len(teachers_of(trainer.teacher)) == 1
    single = make_trainer(tmp_path, train_dataset=two_datasets(), teacher_model=path)
    trainer.train()
    single.train()
    assert losses(trainer) == losses(single)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A base model on disk."""
    return save_model(tmp_path / "base", make_model(0))


def test_adapters_and_base_share_the_students_weights(tmp_path: Path, base: str) -> None:
    """The base and two adapters as teachers, one model in memory; neither is trained, saved, or in a checkpoint."""
    adapters = [save_adapter(tmp_path / f"teacher{i}", base, 5 + i) for i in range(2)]
    names = {"math": "base", "co.de": adapters[0], "law": adapters[1]}
    data = {name: prompts(name[0], 8) for name in names}
    before = parameters_alive()
    trainer = make_trainer(
        tmp_path / "out",
        model=base,
        peft_config=lora(init_lora_weights=False),
        teacher_model=names,
        train_dataset=data,
        save_strategy="steps",
        save_steps=1,
        prompts_per_step={"math": 2, "co.de": 1, "law": 1},
    )
    assert all(isinstance(teacher, AdapterTeacher) for teacher in teachers_of(trainer.teacher))
    assert parameters_alive() - before == sum(p.numel() for p in trainer.model.parameters())

    def expected(name: str, row: int, rollout: Rollout) -> Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        if names[name] != "base":
            model = PeftModel.from_pretrained(model, names[name])
        return score_by_hand(model, rollout)[row]

    order = ("law", "math", "co.de", "math", "law")
    by_hand_BT = torch.stack([expected(name, row, rollout_of(*order)) for row, name in enumerate(order)])
    torch.testing.assert_close(scored(trainer, *order), by_hand_BT, atol=1e-5, rtol=1e-5)
    teachers = {name: w for name, w in weights(trainer.model).items() if TEACHER_ADAPTER in name}
    assert len({name.split(".")[-2] for name in teachers}) == 2
    trainer.train()
    torch.testing.assert_close(scored(trainer, *order), by_hand_BT, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(trainer.model.get_parameter(name), weight) for name, weight in teachers.items())
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not optimized & {id(trainer.model.get_parameter(name)) for name in teachers}
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "out" / "checkpoint-1"):
        assert not [key for key in load_file(folder / WEIGHTS) if TEACHER_ADAPTER in key]
        assert not any(path.is_dir() for path in folder.iterdir())

    resumed = make_trainer(
        tmp_path / "out",
        model=base,
        peft_config=lora(init_lora_weights=False),
        teacher_model=names,
        train_dataset=data,
        prompts_per_step={"math": 2, "co.de": 1, "law": 1},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert losses(resumed)[-1] == losses(trainer)[-1]


def test_an_earlier_trainers_teachers_make_room(tmp_path: Path, base: str) -> None:
    paths = [save_adapter(tmp_path / str(i), base, 5 + i) for i in range(2)]
    first = make_trainer(
        tmp_path, model=base, peft_config=lora(), train_dataset=two_datasets(), teacher_model={"x": paths[0], "y": paths[1]}
    )
    student = first.student()
    assert sum(name.startswith(TEACHER_ADAPTER) for name in student.peft_config) == 2
    make_trainer(tmp_path, model=student, train_dataset=two_datasets(), teacher_model={"x": "base", "y": make_model(3)})
    assert list(student.peft_config) == ["default"] == student.active_adapters


def test_one_dataset_with_a_teacher_column(tmp_path: Path) -> None:
    data = make_dataset(8, teacher=["x", "y"] * 4)
    trainer = make_trainer(tmp_path, train_dataset=data, teacher_model={"x": make_model(1), "y": make_model(2)}, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert {name for name in log if name.startswith("teacher_kl/")} == {"teacher_kl/p99", "teacher_kl/x", "teacher_kl/y"}


def test_a_stream_with_a_teacher_column(tmp_path: Path) -> None:
    data = make_dataset(8, teacher=["x", "y", "y", "z"] * 2).to_iterable_dataset()
    teachers = {name: make_model(i) for i, name in enumerate(("x", "y", "z"), start=1)}
    trainer = make_trainer(tmp_path, train_dataset=data, teacher_model=teachers, max_steps=1)
    trainer.train()
    assert {"teacher_kl/x", "teacher_kl/y", "teacher_kl/z"} <= set(trainer.state.log_history[0])
    del teachers["z"]
    trainer = make_trainer(tmp_path, train_dataset=data, teacher_model=teachers, max_steps=1)
    assert_error(trainer.train, "['z']", "['x', 'y']")


@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_asks_the_teacher_of_each_datasets_name(tmp_path: Path, stream: bool) -> None:
    """y's teacher is the student's equal: its rows have a KL of 0, whichever set is evaluated first."""
    data: dict[str, Any] = two_datasets()
    eval_data = {name: part.to_iterable_dataset() for name, part in data.items()} if stream else data
    mixed = make_dataset(4, teacher=["x", "y"] * 2)
    with pytest.warns(DistillationWarning, match="Teacher 'y': .*the teacher scores as the student does"):
        trainer = make_trainer(
            tmp_path,
            train_dataset=data,
            eval_dataset={**eval_data, "both": mixed},
            teacher_model={"x": make_model(1), "y": make_model(0)},
            eval_strategy="steps",
            eval_steps=1,
            max_steps=1,
        )
        trainer.train()
    before = [entry for entry in trainer.state.log_history if entry["step"] == 0]
    figures = {name: value for entry in before for name, value in entry.items()}
    assert abs(figures["eval_y_teacher_kl"]) < 1e-5 < 0.1 < figures["eval_x_teacher_kl"]
    assert 0 < figures["eval_both_teacher_kl"] < figures["eval_x_teacher_kl"] * 2
    again = trainer.evaluate(data)  # given as a dict, as the trainer got it
    assert again["eval_x_teacher_kl"] != again["eval_y_teacher_kl"]
    alone = make_trainer(tmp_path, teacher_model=make_model(1)).evaluate(data["x"])
    assert figures["eval_x_teacher_kl"] == pytest.approx(alone["eval_teacher_kl"], rel=1e-5)


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    def build(**settings: Any) -> Any:
        teachers = {"x": make_model(1), "y": make_model(2)}
        return lambda: make_trainer(tmp_path, **{"train_dataset": two_datasets(), "teacher_model": teachers, **settings})

    assert_error(build(teacher_model={"x": make_model(1)}), "['y']", "['x']")
    assert_error(build(teacher_model={n: make_model(1) for n in "xyz"}), "no row for the teachers ['z']")
    assert_error(build(teacher_model={}), "empty dict")
    p99 = {"train_dataset": make_dataset(8, teacher=["p99"] * 8), "teacher_model": {"p99": make_model(1)}}
    assert_error(build(**p99), "teacher_kl/p99")
    assert_error(build(train_dataset=make_dataset()), "['x', 'y']", "no 'teacher' column", "['prompt']")
    assert_error(build(train_dataset=make_dataset(8, teacher=["x", "z"] * 4)), "['z']", "['x', 'y']")
    assert_error(build(train_dataset=make_dataset(8, teacher=["x", "x"] * 4)), "no row for the teachers ['y']")
    assert_error(build(train_dataset=make_dataset(8, teacher=["x", None] * 4)), "['None']")
    assert_error(build(eval_dataset={"z": prompts("z", 4)}), "eval_dataset['z']", "['x', 'y']")
    assert_error(build(eval_dataset=prompts("z", 4)), "eval_dataset has no 'teacher' column")


def test_load_settings_for_all_or_by_name(tmp_path: Path, base: str) -> None:
    other = save_model(tmp_path / "other", make_model(2))

    def dtypes(**kwargs: Any) -> list[torch.dtype]:
        trainer = make_trainer(
            tmp_path,
            model=base,
            peft_config=lora(),
            train_dataset={**two_datasets(), "z": prompts("z", 8)},
            teacher_model={"x": base, "y": other, "z": "base"},
            teacher_model_init_kwargs=kwargs,
        )
        return [next(t.model.parameters()).dtype for t in teachers_of(trainer.teacher) if isinstance(t, ModelTeacher)]

    assert dtypes(dtype="bfloat16") == [torch.bfloat16, torch.bfloat16]
    assert dtypes(x={"dtype": "bfloat16"}) == [torch.bfloat16, torch.float32]
    assert_error(lambda: dtypes(z={"dtype": "bfloat16"}), "'base', which is not loaded at all")


# ---- Offload


def test_offloaded_teachers_score_on_the_device_and_stay_on_the_cpu(tmp_path: Path) -> None:
    """There is no second device here: float64 stands for it, which tensors are moved to by the same call."""
    model = make_model(1, tie_word_embeddings=True)
    used: list[set[torch.dtype]] = []
    model.register_forward_pre_hook(lambda module, _: used.append({p.dtype for p in module.parameters()}))
    before = {name: t.data_ptr() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    trainer = make_trainer(tmp_path, teacher_model=model, teacher_offload=True)
    teacher = trainer.teacher
    assert isinstance(teacher, OffloadedTeacher) and teacher.device == trainer.args.device
    rollout = rollout_of("x", "y")
    expected_BT = score_by_hand(make_model(1, tie_word_embeddings=True), rollout)
    torch.testing.assert_close(torch.where(rollout.mask_BT, teacher.score(rollout), 0.0), expected_BT, atol=1e-5, rtol=1e-5)
    teacher.device = cast(Any, torch.float64)
    scores_BT = teacher.score(rollout)
    assert used[0] == {torch.float32} and used[-1] == {torch.float64} and scores_BT.dtype == torch.float64
    torch.testing.assert_close(torch.where(rollout.mask_BT, scores_BT.float(), 0.0), expected_BT, atol=1e-5, rtol=1e-5)
    assert {name: t.data_ptr() for name, t in [*model.named_parameters(), *model.named_buffers()]} == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_offloaded_teachers_train_as_others_do(tmp_path: Path) -> None:
    runs = []
    for offload in (False, True):
        teachers = {"x": make_model(1), "y": make_model(2)}
        trainer = make_trainer(tmp_path, train_dataset=two_datasets(), teacher_model=teachers, teacher_offload=offload)
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


def test_offload_without_a_teacher_of_its_own(tmp_path: Path) -> None:
    assert_error(
        lambda: make_trainer(tmp_path, peft_config=lora(), teacher_model="base", teacher_offload=True), "teacher_offload"
    )


# ---- It learns


def one_minded(token: int, strength: float) -> PreTrainedModel:
    """A model whose next token is always drawn from the same distribution, which favours `token` by `strength` nats."""
    model: Any = make_model(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                parameter.zero_()
            elif "embed" in name:
                parameter.fill_(1.0)  # so that the last hidden state is all ones
        model.lm_head.weight[token] = strength / 16
    return model


def test_each_dataset_learns_from_its_own_teacher(tmp_path: Path) -> None:
    """One teacher likes "a" (10 times as much as anything else), one "b"; the student learns where to write which."""
    a, b = 14 + 4 - 1, 14 + 4  # asserted below
    trainer = make_trainer(
        tmp_path,
        train_dataset={"x": prompts("x", 64), "y": prompts("y", 64)},
        teacher_model={"x": one_minded(a, 5.0), "y": one_minded(b, 5.0)},
        max_completion_length=3,
        per_device_train_batch_size=32,
        max_steps=60,
        learning_rate=2e-2,
    )
    assert trainer.processing_class.convert_ids_to_tokens([a, b]) == ["a", "b"]

    def liking(prompt: str) -> dict[str, float]:
        ids = torch.tensor([trainer.processing_class.encode(prompt)])
        probs = trainer.model(input_ids=ids).logits[0, -1].softmax(dim=-1)
        return {"a": float(probs[a]), "b": float(probs[b])}

    before = [liking(prompt) for prompt in ("x70=", "y70=")]
    trainer.train()
    x, y = liking("x70="), liking("y70=")  # prompts that were not trained on
    assert all(value < 0.2 for probs in before for value in probs.values())
    assert x["a"] > 0.6 and y["b"] > 0.6 and x["b"] < 0.15 and y["a"] < 0.15, (before, x, y)
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    assert all(last[f"teacher_kl/{name}"] < first[f"teacher_kl/{name}"] / 3 for name in ("x", "y"))
