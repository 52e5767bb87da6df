"""Evaluation: what it measures, when it happens, and that training does not notice it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from trl_opd import OnPolicyDistillationTrainer

from .helpers import lora, losses, make_config, make_dataset, make_model, make_trainer, weights


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward: the number of digits."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the number of tokens."""
    return [float(len(ids)) for ids in completion_ids]


class Calls:
    """An evaluator that notes the step of each call and returns scripted scores."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.steps = scores, []

    def __call__(self, trainer: Any) -> dict[str, float]:
        self.steps.append(trainer.state.global_step)
        return {"score": self.scores[len(self.steps) - 1] if self.scores else 0.0}


def careless(trainer: Any) -> dict[str, float]:
    """An evaluator that does what it likes: draws random numbers, sets modes and seeds, rolls out."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trainer.model.train(not trainer.model.training)
    trainer.rollout_and_scores([{"prompt": "1+1="}] * 3, 7)
    trainer.generate_rollout([{"prompt": "2+2="}])
    return {"noise": random.random() + float(np.random.rand()) + float(torch.rand(()))}


def training_figures(run: Any) -> list[dict[str, float]]:
    """The training logs, but for what a clock measured."""
    clocked = ("time/", "tokens_per_second")
    return [
        {k: v for k, v in entry.items() if not k.startswith(clocked)} for entry in run.state.log_history if "loss" in entry
    ]


def eval_steps(run: Any, name: str) -> list[int]:
    return [entry["step"] for entry in run.state.log_history if name in entry]


class Recording(OnPolicyDistillationTrainer):
    """Keeps what it rolled out, with the scores."""

    seen: list[Any]

    def rollout_and_scores(self, rows: list[dict[str, Any]], *stream: int) -> Any:
        result = super().rollout_and_scores(rows, *stream)
        self.__dict__.setdefault("seen", []).append(result)
        return result


def test_figures_are_those_of_the_completions_whatever_the_batches(tmp_path: Path) -> None:
    """Six prompts in batches of 4 and 2: means over tokens and completions, not over batches."""
    settings = {"reward_funcs": [digits, length], "reward_weights": [2.0, -1.0], "num_generations": 2}
    run = make_trainer(tmp_path, cls=Recording, eval_dataset=make_dataset(6), per_device_eval_batch_size=4, **settings)
    figures = run.evaluate()

    rollouts = [rollout for rollout, *_ in run.seen]
    assert [len(rollout) for rollout in rollouts] == [4, 2]
    kl = torch.cat([(rollout.sampled_logps_BT - logps_BT)[rollout.mask_BT] for rollout, logps_BT, *_ in run.seen]).double()
    lengths = [len(ids) for rollout in rollouts for ids in rollout.completion_ids()]
    stopped = [bool(s) for rollout in rollouts for s in rollout.stopped_B]
    rewards = [row for _, _, rewards_BF, _ in run.seen for row in rewards_BF.tolist()]
    assert kl.numel() == sum(lengths)
    assert figures["eval_teacher_kl"] == pytest.approx(float(kl.mean()))
    assert figures["eval_teacher_kl/p99"] == pytest.approx(float(np.quantile(kl.numpy(), 0.99, method="inverted_cdf")))
    assert figures["eval_completions/mean_length"] == pytest.approx(sum(lengths) / 6)
    assert (figures["eval_completions/min_length"], figures["eval_completions/max_length"]) == (min(lengths), max(lengths))
    assert figures["eval_completions/stopped_fraction"] == pytest.approx(sum(stopped) / 6)
    assert figures["eval_completions/truncated_fraction"] == pytest.approx(1 - sum(stopped) / 6)
    assert figures["eval_reward/digits"] == pytest.approx(sum(d for d, _ in rewards) / 6)
    assert figures["eval_reward/length"] == pytest.approx(sum(lengths) / 6)
    assert figures["eval_reward"] == pytest.approx(sum(2 * d - n for d, n in rewards) / 6)
    assert run.state.log_history[-1]["eval_teacher_kl"] == figures["eval_teacher_kl"]


def test_each_dataset_has_its_own_figures(tmp_path: Path) -> None:
    """A dict of datasets; each one's figures are those it would have alone."""
    both = {"easy": make_dataset(4), "hard": make_dataset(8).select(range(4, 8))}
    together = make_trainer(tmp_path, eval_dataset=both).evaluate()
    for name, dataset in both.items():
        alone = make_trainer(tmp_path, eval_dataset=dataset).evaluate()
        for figure in ("teacher_kl", "completions/mean_length"):
            assert together[f"eval_{name}_{figure}"] == alone[f"eval_{figure}"]
    assert together["eval_easy_teacher_kl"] != together["eval_hard_teacher_kl"]
    assert "eval_teacher_kl" not in together


@pytest.mark.parametrize("data", ["none", "one", "dict"])
@pytest.mark.parametrize(("max_steps", "expected"), [(5, [0, 2, 4, 5]), (4, [0, 2, 4])])
def test_evaluation_before_the_first_step_every_eval_steps_and_after_the_last(
    tmp_path: Path, data: str, max_steps: int, expected: list[int]
) -> None:
    """Once each, also where an epoch ends (every second step here)."""
    dataset = {"none": None, "one": make_dataset(2), "dict": {"a": make_dataset(2), "b": make_dataset(1)}}[data]
    calls, other = Calls(), Calls()
    run = make_trainer(
        tmp_path,
        train_dataset=make_dataset(4),
        eval_dataset=dataset,
        evaluators=[calls, other],
        max_steps=max_steps,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        max_completion_length=3,
    )
    run.train()
    assert calls.steps == other.steps == eval_steps(run, "eval_score") == expected
    for name in {"none": [], "one": ["eval_teacher_kl"], "dict": ["eval_a_teacher_kl", "eval_b_teacher_kl"]}[data]:
        assert eval_steps(run, name) == expected


@pytest.mark.parametrize("peft_config", [lora(), None], ids=["LoRA", "full"])
def test_training_does_not_notice_evaluation(tmp_path: Path, peft_config: Any) -> None:
    """Losses, weights and every training figure are the same with evaluations, careless evaluators included, and without."""
    settings = {
        "peft_config": peft_config,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "num_substeps": 2,
        "max_steps": 4,
        "reward_funcs": digits,
    }
    without = make_trainer(tmp_path, **settings)
    without.train()
    evaluated = make_trainer(
        tmp_path,
        eval_dataset={"a": make_dataset(3), "b": make_dataset(2)},
        evaluators=[careless],
        eval_strategy="steps",
        eval_steps=1,
        **settings,
    )
    evaluated.train()
    assert eval_steps(evaluated, "eval_noise") == eval_steps(evaluated, "eval_a_teacher_kl") == [0, 1, 2, 3, 4]
    assert training_figures(evaluated) == training_figures(without)
    one, other = weights(without.model), weights(evaluated.model)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_evaluator_that_fails_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    def broken(trainer: Any) -> dict[str, float]:
        torch.manual_seed(1)
        trainer.model.eval()
        raise ZeroDivisionError

    run = make_trainer(tmp_path, evaluators=[broken])
    run.model.train()
    metrics, random_state = run.metrics, torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        run.evaluate()
    assert run.metrics is metrics
    assert run.model.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_same_evaluation_twice_gives_the_same_figures(tmp_path: Path) -> None:
    run = make_trainer(tmp_path, eval_dataset=make_dataset(5), reward_funcs=digits, num_generations=2)
    one, _, other = run.evaluate(), torch.rand(3), run.evaluate()
    clocked = {name for name in one if "runtime" in name or "per_second" in name}
    assert {k: v for k, v in one.items() if k not in clocked} == {k: v for k, v in other.items() if k not in clocked}


def test_completions_of_one_evaluation_differ_from_each_other(tmp_path: Path) -> None:
    """The same stream each time must not mean the same stream for each batch."""
    run = make_trainer(
        tmp_path,
        cls=Recording,
        eval_dataset=make_dataset(1).select([0] * 4),
        per_device_eval_batch_size=2,
        max_completion_length=12,
    )
    run.evaluate()
    texts = [tuple(ids) for rollout, *_ in run.seen for ids in rollout.completion_ids()]
    assert len(set(texts)) == 4


def test_completion_and_reward_figures_do_not_depend_on_the_teacher(tmp_path: Path) -> None:
    settings = {"eval_dataset": make_dataset(4), "reward_funcs": digits, "num_generations": 2}
    one, other = (make_trainer(tmp_path, teacher_model=make_model(seed), **settings).evaluate() for seed in (1, 2))
    of_student = [name for name in one if "completions/" in name or "reward" in name]
    assert len(of_student) == 7
    assert {name: one[name] for name in of_student} == {name: other[name] for name in of_student}
    assert one["eval_teacher_kl"] != other["eval_teacher_kl"]


def test_evaluating_before_training_changes_nothing(tmp_path: Path) -> None:
    plain, early = (make_trainer(tmp_path, eval_dataset=make_dataset(3), evaluators=[careless]) for _ in range(2))
    first = early.evaluate()
    assert first["eval_teacher_kl"] > 0
    assert "eval_noise" in first
    for run in (plain, early):
        run.train()
    assert losses(plain) == losses(early)
    assert training_figures(plain) == training_figures(early)


def test_another_dataset_can_be_evaluated_at_any_time(tmp_path: Path) -> None:
    """Then the evaluators are not called, and the figures carry the prefix asked for."""
    calls = Calls()
    run = make_trainer(tmp_path, evaluators=[calls])
    figures = run.evaluate(make_dataset(3), metric_key_prefix="test")
    assert figures["test_teacher_kl"] > 0
    assert calls.steps == []


def test_time_is_counted_once(tmp_path: Path) -> None:
    """`time/eval` of two datasets and an evaluator is no more than all of it took, and is not taken for training time."""

    class Timed(OnPolicyDistillationTrainer):
        spent = 0.0
        depth = 0

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            start, self.depth = time.perf_counter(), self.depth + 1
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.spent += time.perf_counter() - start

    def slow(trainer: Any) -> dict[str, float]:
        time.sleep(0.05)
        return {}

    both = {"a": make_dataset(2), "b": make_dataset(2)}
    run = make_trainer(
        tmp_path, cls=Timed, eval_dataset=both, evaluators=[slow], eval_strategy="steps", eval_steps=9, max_steps=1
    )
    run.train()
    first = training_log(run)
    assert 0.05 < first["time/eval"] <= run.spent
    assert first["tokens_per_second"] > 0


def training_log(run: Any) -> dict[str, float]:
    return next(entry for entry in run.state.log_history if "loss" in entry)


@pytest.mark.parametrize("with_data", [False, True])
def test_the_best_checkpoint_by_an_evaluators_figure_is_loaded_at_the_end(tmp_path: Path, with_data: bool) -> None:
    run = make_trainer(
        tmp_path,
        peft_config=lora(),
        eval_dataset=make_dataset(2) if with_data else None,
        evaluators=[Calls(0.0, 0.1, 0.9, 0.3)],  # before the first step, then after steps 1, 2, 3
        max_steps=3,
        metric_for_best_model="score",
        greater_is_better=True,
        **EVERY_STEP,
    )
    run.train()
    assert run.state.best_metric == 0.9
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert_weights_of(run, tmp_path / "checkpoint-2")


def test_the_best_checkpoint_by_teacher_kl_is_loaded_at_the_end(tmp_path: Path) -> None:
    """A learning rate far too high makes a later step worse than an earlier one."""
    run = make_trainer(
        tmp_path,
        peft_config=lora(),
        eval_dataset=make_dataset(4),
        max_steps=4,
        learning_rate=0.5,
        metric_for_best_model="eval_teacher_kl",
        greater_is_better=False,
        **EVERY_STEP,
    )
    run.train()
    kl = {entry["step"]: entry["eval_teacher_kl"] for entry in run.state.log_history if "eval_teacher_kl" in entry}
    best = min((1, 2, 3, 4), key=lambda step: kl[step])
    assert best != 4
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert_weights_of(run, tmp_path / f"checkpoint-{best}")
    assert run.evaluate()["eval_teacher_kl"] == kl[best]


def test_a_kl_is_better_when_it_is_smaller(tmp_path: Path) -> None:
    assert make_config(tmp_path, metric_for_best_model="eval_teacher_kl").greater_is_better is False
    assert make_config(tmp_path, metric_for_best_model="eval_teacher_kl", greater_is_better=True).greater_is_better is True
    assert make_config(tmp_path, metric_for_best_model="eval_accuracy").greater_is_better is True


def test_a_reward_may_be_called_after_tokens(tmp_path: Path) -> None:
    def count_tokens(completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(tmp_path, eval_dataset=make_dataset(4), reward_funcs=count_tokens, num_generations=2)
    figures = trainer.evaluate()
    assert figures["eval_reward/count_tokens"] == figures["eval_completions/mean_length"]


@pytest.mark.parametrize("with_data", [False, True])
def test_early_stopping_sees_the_evaluators_figures(tmp_path: Path, with_data: bool) -> None:
    run = make_trainer(
        tmp_path,
        eval_dataset=make_dataset(2) if with_data else None,
        evaluators=[Calls(0.9, 0.9, 0.5, 0.4, 0.3, 0.2)],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        max_steps=5,
        metric_for_best_model="score",
        greater_is_better=True,
        **EVERY_STEP,
    )
    run.train()
    assert run.state.global_step == 3


EVERY_STEP = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def assert_weights_of(run: Any, checkpoint: Path) -> None:
    own = {name.replace(".default", ""): tensor for name, tensor in weights(run.model).items()}
    for name, tensor in load_file(checkpoint / "adapter_model.safetensors").items():
        assert torch.equal(own[name], tensor)
