"""Several datasets: exact numbers of prompts in every rollout, an even mix in its parts, an order that (seed, epoch) fixes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from trl_opd import OnPolicyDistillationTrainer, Rollout
from trl_opd.mixing import MixedSampler, Mixture, NamedRows, make_mixture, proportional
from trl_opd.rows import SampledRows, Shares

from .helpers import make_config, make_model, make_trainer, weights
from .test_errors import assert_error


def prompts(letter: str, number: int, **columns: Any) -> datasets.Dataset:
    """`number` different prompts that begin with a letter, by which a test tells their dataset."""
    return datasets.Dataset.from_dict({"prompt": [f"{letter}{i}=" for i in range(number)], **columns})


class Recording(OnPolicyDistillationTrainer):
    """Keeps the rows of each rollout and of each optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rolled_out: list[list[dict[str, Any]]] = []

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        self.rolled_out.append([dict(row) for row in rows])
        return super().generate_rollout(rows)


def letters(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(row["prompt"][0] for row in rows))


# ---- The order


def test_turns_are_spread_evenly() -> None:
    """By hand: a's turns at 1/6, 3/6, 5/6, b's at 1/2; where two coincide the first dataset is first."""
    assert Mixture((9, 9), (3, 1)).slots() == [0, 0, 1, 0]
    assert Mixture((9, 9), (2, 2)).slots() == [0, 1, 0, 1]
    assert Mixture((9, 9, 9), (4, 2, 1)).slots() == [0, 1, 0, 2, 0, 1, 0]


@pytest.mark.parametrize("numbers", [(6, 2), (4, 4), (10, 4, 2), (2, 2, 2)])
def test_both_halves_of_a_rollout_have_half_of_each(numbers: tuple[int, ...]) -> None:
    slots = Mixture(tuple(50 for _ in numbers), numbers).slots()
    half = len(slots) // 2
    for part in (slots[:half], slots[half:]):
        assert [part.count(i) for i in range(len(numbers))] == [number // 2 for number in numbers]


def test_numbers_that_parts_do_not_divide_are_off_by_one_at_most() -> None:
    slots = Mixture((50, 50), (5, 3)).slots()
    assert [slots[:4].count(0), slots[4:].count(0)] in ([3, 2], [2, 3])


def test_an_epoch_in_order_by_hand() -> None:
    """Rows 0 to 3 are a's, 4 to 9 b's; a rollout takes one of a and two of b, so that b ends after three."""
    mixture = Mixture((4, 6), (1, 2))
    assert mixture.rollouts == 3
    assert mixture.order(seed=0, epoch=0, shuffle=False) == [4, 0, 5, 6, 1, 7, 8, 2, 9]


def test_all_exhausted_goes_through_every_row_and_begins_the_others_again() -> None:
    mixture = Mixture((4, 7), (1, 2), all_exhausted=True)
    assert mixture.rollouts == 4
    order = mixture.order(seed=0, epoch=0, shuffle=False)
    assert [row for row in order if row < 4] == [0, 1, 2, 3]
    assert [row for row in order if row >= 4] == [4, 5, 6, 7, 8, 9, 10, 4]
    many = Counter(Mixture((2, 12), (2, 2), all_exhausted=True).order(seed=3, epoch=0, shuffle=True))
    assert set(many) == set(range(14)) and [many[0], many[1]] == [6, 6] and sum(many.values()) == 24


def test_a_dataset_that_begins_again_does_so_in_another_order() -> None:
    order = Mixture((8, 80), (2, 2), all_exhausted=True).order(seed=0, epoch=0, shuffle=True)
    small = [row for row in order if row < 8]
    passes = [small[i : i + 8] for i in range(0, 80, 8)]
    assert all(sorted(one) == list(range(8)) for one in passes) and len(set(map(tuple, passes))) > 8


def test_the_shuffled_order_depends_on_seed_and_epoch_only() -> None:
    mixture = Mixture((20, 30), (2, 3))
    first = mixture.order(0, 0, shuffle=True)
    torch.rand(3)
    assert mixture.order(0, 0, shuffle=True) == first
    assert len({tuple(mixture.order(seed, epoch, shuffle=True)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert len(set(first)) == len(first) == 50
    assert sorted(first) != first


def test_exact_numbers_in_each_step_of_any_layout() -> None:
    """Steps of 8 prompts x 2 completions, 6 of a and 2 of b: one process, and two with half the batch."""
    mixture = Mixture((40, 13), (6, 2))
    for shares, accumulation in ((Shares(1, 4, 2), 4), (Shares(2, 4, 2), 2), (Shares(2, 2, 2), 4), (Shares(2, 1, 2), 8)):
        sampler = MixedSampler(mixture, shares, shuffle=True, seed=5)
        order = list(sampler)
        assert len(order) == len(sampler) == 6 * 16 and min(order) >= 0
        for step in zip(*[iter(order)] * 16, strict=True):
            assert sum(row < 40 for row in step) == 12
            assert set(Counter(step).values()) == {2}
        assert accumulation * shares.num_processes * shares.batch_size == 16


def test_two_processes_get_the_rows_of_one() -> None:
    mixture = Mixture((40, 13), (6, 2))
    one = list(MixedSampler(mixture, Shares(1, 16, 2), shuffle=True, seed=5))
    two = list(MixedSampler(mixture, Shares(2, 4, 2), shuffle=True, seed=5))
    for start in range(0, len(one), 16):
        assert sorted(one[start : start + 16]) == sorted(two[start : start + 16])


# ---- The rows


def test_rows_have_their_datasets_name_and_every_column() -> None:
    rows = NamedRows({"x": prompts("x", 2, answer=[1, 2]), "y": prompts("y", 2, source=["s", "t"])}, ["dataset"])
    assert len(rows) == 4
    assert rows.__getitems__([3, 0, 3]) == [
        {"prompt": "y1=", "source": "t", "answer": None, "dataset": "y"},
        {"prompt": "x0=", "source": None, "answer": 1, "dataset": "x"},
        {"prompt": "y1=", "source": "t", "answer": None, "dataset": "y"},
    ]
    assert SampledRows(rows)[2]["prompt"] == "y0="


def test_a_teacher_column_of_ones_own_stays() -> None:
    rows = NamedRows({"x": prompts("x", 1, teacher=["p"]), "y": prompts("y", 1)}, ["dataset", "teacher"])
    assert [row["teacher"] for row in rows.__getitems__([0, 1])] == ["p", "y"]


def test_proportions() -> None:
    """8 prompts of 60, 30 and 10 rows: 4.8, 2.4 and 0.8; the smallest has one in any case."""
    assert proportional({"a": 60, "b": 30, "c": 10}, 8) == {"a": 5, "b": 2, "c": 1}
    assert proportional({"a": 1000, "b": 1}, 4) == {"a": 3, "b": 1}
    assert proportional({"a": 5, "b": 5}, 2) == {"a": 1, "b": 1}


# ---- In training


@pytest.mark.parametrize("workers", [0, 1])
def test_each_rollout_has_the_numbers_that_were_asked_for(tmp_path: Path, workers: int) -> None:
    data = {"x": prompts("x", 20), "y": prompts("y", 5)}
    trainer = make_trainer(
        tmp_path,
        cls=Recording,
        train_dataset=data,
        prompts_per_step={"x": 3, "y": 1},
        max_steps=5,
        num_generations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        dataloader_num_workers=workers,
    )
    trainer.train()
    assert [letters(rows) for rows in trainer.rolled_out] == [{"x": 6, "y": 2}] * 5
    assert all(row["dataset"] == row["prompt"][0] for rows in trainer.rolled_out for row in rows)
    for entry in trainer.state.log_history[:5]:
        assert entry["teacher_kl/x"] != entry["teacher_kl/y"]


def test_kl_by_name_adds_up(tmp_path: Path) -> None:
    """Two routes: by name, weighted by each name's tokens, and at once."""
    trainer = make_trainer(
        tmp_path, train_dataset={"x": prompts("x", 6), "y": prompts("y", 6)}, max_steps=1, per_device_train_batch_size=6
    )
    seen: dict[str, list[float]] = {"x": [], "y": []}
    inner = trainer.rollout_and_scores

    def spy(rows: Any, *stream: int) -> Any:
        result = inner(rows, *stream)
        rollout, teacher_logps_BT, *_ = result
        kl_BT = rollout.sampled_logps_BT - teacher_logps_BT
        for i, row in enumerate(rollout.rows):
            seen[row["prompt"][0]] += kl_BT[i][rollout.mask_BT[i]].tolist()
        return result

    trainer.rollout_and_scores = spy
    trainer.train()
    log = trainer.state.log_history[0]
    for name, values in seen.items():
        assert log[f"teacher_kl/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    together = seen["x"] + seen["y"]
    assert log["teacher_kl"] == pytest.approx(sum(together) / len(together), rel=1e-5)


def test_substeps_mix_the_datasets_alike(tmp_path: Path) -> None:
    """A rollout of 6 and 2 prompts for two updates: each trains on 3 and 1."""
    trained: list[int] = []

    class Updates(Recording):
        def compute_policy_loss(self, logps_BT: Any, batch: Any, num_items: Any) -> Any:
            trained.append(sum(int(first) == x for first in batch.ids_BT[:, 0]))
            return super().compute_policy_loss(logps_BT, batch, num_items)

    trainer = make_trainer(
        tmp_path,
        cls=Updates,
        train_dataset={"x": prompts("x", 12), "y": prompts("y", 12)},
        prompts_per_step={"x": 6, "y": 2},
        num_substeps=2,
        max_steps=4,
    )
    x = trainer.processing_class.encode("x")[0]
    trainer.train()
    assert [letters(rows) for rows in trainer.rolled_out] == [{"x": 6, "y": 2}] * 2
    assert trained == [3, 3, 3, 3]


def test_epochs_end_with_the_first_dataset_or_with_the_last(tmp_path: Path) -> None:
    data = {"x": prompts("x", 12), "y": prompts("y", 5)}
    for strategy, steps in (("first_exhausted", 5), ("all_exhausted", 4)):
        numbers = {"x": 2, "y": 1} if strategy == "first_exhausted" else {"x": 3, "y": 3}
        trainer = make_trainer(
            tmp_path,
            cls=Recording,
            train_dataset=data,
            prompts_per_step=numbers,
            stopping_strategy=strategy,
            per_device_train_batch_size=sum(numbers.values()),
            max_steps=-1,
            num_train_epochs=2,
        )
        trainer.train()
        assert trainer.state.global_step == len(trainer.rolled_out) == 2 * steps
        epochs = [[row["prompt"] for rows in trainer.rolled_out[i : i + steps] for row in rows] for i in (0, steps)]
        assert epochs[0] != epochs[1]
        for epoch in epochs:
            assert len({p for p in epoch if p[0] == "y"}) == 5
            assert strategy == "first_exhausted" or len({p for p in epoch if p[0] == "x"}) == 12


@pytest.mark.parametrize("substeps", [1, 2])
def test_resume_equals_no_interruption(tmp_path: Path, substeps: int) -> None:
    """Bit for bit, across the end of an epoch; with two substeps a rollout is half used at the interruption."""
    settings: dict[str, Any] = {
        "cls": Recording,
        "train_dataset": {"x": prompts("x", 9), "y": prompts("y", 9)},
        "prompts_per_step": {"x": 3 * substeps, "y": substeps},
        "num_substeps": substeps,
        "max_steps": 6,
    }
    whole = make_trainer(tmp_path / "whole", save_strategy="steps", save_steps=3, **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.rolled_out == whole.rolled_out[-len(resumed.rolled_out) :]
    expected = weights(whole.model)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed.model).items())


def test_rewards_get_what_a_row_has(tmp_path: Path) -> None:
    """A column that only one dataset has is None for the rows of the other, also where a micro-batch has no row with it."""
    asked: list[tuple[str, Any]] = []

    def reward(completions: Any, answer: list[Any], dataset: list[str], **_: Any) -> list[float | None]:
        asked.extend(zip(dataset, answer, strict=True))
        return [None if value is None else float(value) for value in answer]

    trainer = make_trainer(
        tmp_path,
        train_dataset={"x": prompts("x", 8, answer=[1] * 8), "y": prompts("y", 8)},
        reward_funcs=reward,
        num_generations=2,
        max_steps=2,
    )
    trainer.train()
    assert set(asked) == {("x", 1), ("y", None)}


# ---- What cannot work


def test_numbers_that_do_not_fit(tmp_path: Path) -> None:
    def build(**settings: Any) -> Any:
        data = {"x": prompts("x", 20), "y": prompts("y", 2)}
        return lambda: make_trainer(tmp_path, **{"train_dataset": data, **settings})

    assert_error(build(prompts_per_step={"x": 3, "z": 1}), "['x', 'z']", "['x', 'y']")
    assert_error(build(prompts_per_step={"x": 3, "y": 2}), "has 4 prompts", "adds up to 5")
    assert_error(build(prompts_per_step={"x": 1, "y": 3}), "train_dataset['y'] has 2 prompts", "takes 3")
    assert_error(build(prompts_per_step={"x": 4, "y": 0}), "prompts_per_step['y'] is 0")
    assert_error(build(prompts_per_step={"x": 4}, train_dataset=prompts("x", 8)), "one dataset")
    assert_error(build(per_device_train_batch_size=1), "has 1 prompts", "one for each of the 2")
    assert_error(build(stopping_strategy="never"), "stopping_strategy is 'never'", "all_exhausted")
    assert_error(build(train_dataset={}), "empty dict")


def test_datasets_that_do_not_fit(tmp_path: Path) -> None:
    def build(**parts: Any) -> Any:
        return lambda: make_trainer(tmp_path, train_dataset={"x": prompts("x", 8), **parts})

    assert_error(build(y=prompts("y", 8, dataset=["d"] * 8)), "train_dataset['y'] has a column 'dataset'")
    assert_error(build(y=datasets.Dataset.from_dict({"text": ["a"]})), "train_dataset['y'] has no 'prompt' column")
    assert_error(build(y=prompts("y", 8).to_iterable_dataset()), "train_dataset['y'] is a stream", "interleave_datasets")
    assert_error(build(p99=prompts("y", 8)), "teacher_kl/p99")


def test_long_prompts_are_dropped_from_each(tmp_path: Path) -> None:
    long = datasets.Dataset.from_dict({"prompt": ["y" * 40] * 3 + ["y1="] * 5})
    with pytest.warns(UserWarning, match="3 of 8 prompts"):
        trainer = make_trainer(
            tmp_path, train_dataset={"x": prompts("x", 8), "y": long}, long_prompts="drop", max_prompt_length=10
        )
    assert trainer.train_dataset.sizes == {"x": 8, "y": 5}


def test_settings_from_the_command_line(tmp_path: Path) -> None:
    several = '{"x": "base", "y": "some/path"}'
    args = make_config(tmp_path, prompts_per_step='{"x": 3, "y": 1}', teacher_model_name_or_path=several)
    assert args.teacher_model_name_or_path == {"x": "base", "y": "some/path"}
    assert make_mixture({"x": 9, "y": 9}, args).prompts == (3, 1)
    assert make_config(tmp_path, teacher_model_name_or_path="some/path").teacher_model_name_or_path == "some/path"
    assert_error(lambda: make_config(tmp_path, teacher_model_name_or_path='{"x": '), "teacher_model_name_or_path", "JSON")


def test_one_model_card_for_several(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        train_dataset={"x": prompts("x", 8), "y": prompts("y", 4)},
        teacher_model={"x": make_model(1), "y": make_model(2)},
        prompts_per_step={"x": 3, "y": 1},
    )
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "several teachers (x: a model that was made in memory; y: a model that was made in memory)" in card
    assert "12 prompts (x: 8, y: 4)" in card and "| prompts_per_step | `{'x': 3, 'y': 1}` |" in card
