"""Users' own loops: several turns with a mask, log-probs given or left out, columns for rewards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trl_opd import Completion, Rollout, kl_advantages
from trl_opd.completions import completion_records
from trl_opd.rollout import trajectories
from trl_opd.rows import Filler, Row

from .helpers import make_model, make_trainer, weights

IDS, MASK = [5, 1, 20, 21, 7, 1], [1, 1, 0, 0, 1, 1]
"""Two turns that end with the stop token 1, and two tokens between them that are not the student's."""


def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Trajectories of two turns; log-probs left out."""
    return {
        "prompt_ids": [trainer.prompt_encoder.encode({"prompt": prompt}) for prompt in prompts],
        "completion_ids": [[*IDS[:-1], 8 + i, 1] for i in range(len(prompts))],
        "env_mask": [[*MASK, 1]] * len(prompts),
    }


def parsed(returned: Any, rows: int = 1, **more: Any) -> Any:
    """What a function's result is turned into."""
    arguments = {"stop_ids": [1], "vocab_size": 43, "context": 128, **more}
    return trajectories(returned, [{"prompt": "1+1="}] * rows, **arguments)


def test_each_turns_tokens_and_nothing_else_are_actions() -> None:
    logps = [-1.0, -2.0, None, float("nan"), -3.0, -4.0]
    prompts, completions, rows = parsed(
        {"prompt_ids": [[9, 9]], "completion_ids": [IDS], "env_mask": [MASK], "logprobs": [logps]}
    )
    rollout = Rollout.build(prompts, completions, rows, pad_id=0, device=torch.device("cpu"))
    assert rollout.mask_BT.tolist() == [[False, False, True, True, False, False, True, True]]
    assert rollout.sampled_logps_BT.tolist() == [[0, 0, -1, -2, 0, 0, -3, -4]]
    assert rollout.attention_mask_BT.all()
    assert rollout.stopped_B.tolist() == [True]
    assert rollout.completion_ids() == [IDS]


@pytest.mark.parametrize(
    ("ids", "mask", "stopped"),
    [
        ([5, 1], [1, 1], True),
        ([5, 6], [1, 1], False),
        ([5, 1, 20], [1, 1, 0], True),  # the environment had the last word
        ([5, 6, 1], [1, 1, 0], False),  # which may hold the stop token
        ([5, 1], [0, 0], False),
    ],
)
def test_stopped_is_told_by_the_last_sampled_token(ids: list[int], mask: list[int], stopped: bool) -> None:
    returned = {"prompt_ids": [[9]], "completion_ids": [ids], "env_mask": [mask]}
    assert parsed(returned)[1][0].stopped is stopped
    assert parsed({**returned, "stopped": [not stopped]})[1][0].stopped is not stopped


def test_the_discount_passes_over_what_others_said() -> None:
    """By hand: d = 1 on each action; R = -1 - 0.5 R(next action)."""
    mask = torch.tensor([[0, 1, 0, 0, 1, 1]])
    advantages = kl_advantages(torch.zeros(1, 6), -torch.ones(1, 6), mask, discount=0.5)
    assert advantages.tolist() == [[0, -1.75, 0, 0, -1.5, -1]]


def test_arrays_and_tensors_are_taken() -> None:
    returned = {"prompt_ids": torch.tensor([[9, 9]]), "completion_ids": (np.array(IDS),), "logprobs": [-torch.ones(6)]}
    prompts, completions, _ = parsed(returned)
    assert prompts == [[9, 9]]
    assert completions == [Completion(IDS, [-1.0] * 6, True)]


def test_other_keys_are_columns_of_the_same_row() -> None:
    row = Filler({"prompt": "1+1=", "answer": 3})
    row.seed = 11
    (other,) = trajectories(
        {"prompt_ids": [[9]], "completion_ids": [IDS], "won": [True]}, [row], stop_ids=[1], vocab_size=43, context=None
    )[2]
    assert other == {"prompt": "1+1=", "answer": 3, "won": True}
    assert isinstance(other, Filler)
    assert isinstance(other, Row)
    assert other.seed == 11


GOOD = {"prompt_ids": [[9]], "completion_ids": [IDS], "env_mask": [MASK], "logprobs": [[-1.0] * 6]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completion_ids": [IDS, IDS]}, "2 completion_ids for 1 prompts"),
        ({"env_mask": [MASK[:-1]]}, r"env_mask\[0\] has 5 values for 6 completion_ids"),
        ({"logprobs": [[-1.0] * 7]}, r"logprobs\[0\] has 7 values for 6 completion_ids"),
        ({"logprobs": [[[-1.0, -2.0]] * 6]}, "one finite number"),
        ({"logprobs": [[float("nan")] * 6]}, "one finite number"),
        ({"env_mask": [[2] * 6]}, "must hold 1"),
        ({"completion_ids": ["text"]}, "list of token ids"),
        ({"completion_ids": [[1.5]]}, "list of token ids"),
        ({"completion_ids": [[]]}, "is empty"),
        ({"completion_ids": [[99, 1]]}, "holds the id 99"),
        ({"won": [1, 2, 3]}, "3 won for 1 prompts"),
        ({"won": 3}, "won is a int"),
        ({"prompts": [1]}, "Give them other names"),
    ],
)
def test_what_does_not_fit_is_told(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed({**GOOD, **change})


def test_missing_keys_and_other_types_are_told() -> None:
    with pytest.raises(ValueError, match=r"not \['completion_ids'\]"):
        parsed({"prompt_ids": [[9]]})
    with pytest.raises(ValueError, match="returned a list"):
        parsed([])
    with pytest.raises(ValueError, match=r"7 tokens .* context is 6"):
        parsed(GOOD, context=6)


# ---- In a run


def test_logps_that_are_left_out_are_the_students_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func=given)
    rollout = trainer.generate_rollout(trainer.train_dataset.select(range(4)).to_list())
    student_logps_BT = trainer.student_logps(rollout)
    assert torch.equal(rollout.sampled_logps_BT, torch.where(rollout.mask_BT, student_logps_BT, 0.0))
    assert (rollout.sampled_logps_BT < 0).equal(rollout.mask_BT)


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_what_is_between_the_turns_moves_no_advantage(tmp_path: Path, discount: float) -> None:
    trainer = make_trainer(tmp_path, rollout_func=given, kl_discount_factor=discount)
    batch = trainer.scored_batch(trainer.train_dataset.select(range(4)).to_list())
    assert (batch.advantages_BT != 0).equal(batch.mask_BT)
    assert batch.mask_BT.sum() == 4 * 5


def test_a_run_counts_the_students_tokens_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func=given, max_steps=1, log_completions=True)
    before = weights(trainer.model)
    trainer.train()
    figures = trainer.state.log_history[0]
    assert figures["tokens"] == 4 * 5
    assert figures["completions/mean_length"] == 7
    assert figures["completions/stopped_fraction"] == 1
    assert figures["sampler_kl/v2"] < 1e-10
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


def test_records_tell_what_was_trained_on(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func=given)
    rows = trainer.train_dataset.select(range(2)).to_list()
    rollout = trainer.generate_rollout(rows)
    batch = trainer.scored_batch(rows)
    record = completion_records(rollout, batch, trainer.processing_class, 1)[0]
    assert record["trained"] == [bool(value) for value in [*MASK, 1]]
    assert len(record["tokens"]) == 7


def test_each_prompt_is_given_as_often_as_it_has_completions(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def loop(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen.append(prompts)
        return {**given(prompts, trainer), "won": [len(prompt) for prompt in prompts]}

    def reward(won: list[int], **_: Any) -> list[float]:
        return [float(value) for value in won]

    trainer = make_trainer(tmp_path, rollout_func=loop, num_generations=2, reward_funcs=reward, max_steps=1)
    trainer.train()
    assert len(seen[0]) == 4
    assert seen[0][0] == seen[0][1] != seen[0][2] == seen[0][3]
    assert trainer.state.log_history[0]["reward/reward"] == sum(map(len, seen[0])) / 4


def test_a_loop_may_sample_with_the_engine(tmp_path: Path) -> None:
    """Two turns of the student with a word between them; the engine's log-probs are the trainer's."""

    def loop(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [trainer.prompt_encoder.encode({"prompt": prompt}) for prompt in prompts]
        first = trainer.engine.generate(trainer.student(), prompt_ids)
        so_far = [ids + turn.ids + [20, 21] for ids, turn in zip(prompt_ids, first, strict=True)]
        second = trainer.engine.generate(trainer.student(), so_far)
        pairs = list(zip(first, second, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*a.ids, 20, 21, *b.ids] for a, b in pairs],
            "logprobs": [[*a.logps, 0.0, 0.0, *b.logps] for a, b in pairs],
            "env_mask": [[1] * len(a.ids) + [0, 0] + [1] * len(b.ids) for a, b in pairs],
        }

    trainer = make_trainer(tmp_path, rollout_func=loop, model=make_model(3), max_steps=3)
    trainer.train()
    assert all(entry["sampler_kl/v2"] < 1e-9 for entry in trainer.state.log_history if "loss" in entry)


def test_teachers_with_prompts_of_their_own_score_the_same_tokens(tmp_path: Path) -> None:
    """The teacher reads another prompt, then all turns: each token's score is that of this conversation."""
    trainer = make_trainer(tmp_path, rollout_func=given)
    rows = [{"prompt": "1+1=", "teacher_prompt": "the answer of 1+1="}, {"prompt": "20+3=", "teacher_prompt": "of 20+3="}]
    rollout = trainer.generate_rollout(rows)
    scores_BT = trainer.score_with_teacher(rollout)
    for row, (own, start) in enumerate(zip(rows, rollout.prompt_lengths_B.tolist(), strict=True)):
        prompt = trainer.prompt_encoder.encode(own, "teacher_prompt")
        completion = rollout.completion_ids()[row]
        logps = trainer.teacher.model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for t, token in enumerate(completion):
            assert scores_BT[row, start + t].item() == pytest.approx(logps[len(prompt) + t - 1, token].item(), abs=1e-5)
