"""Rollout and ScoredBatch: lengths, masks, cuts, and the teacher's scores on the student's positions; worked out by hand."""

from __future__ import annotations

import io
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn

from trl_opd import kl_advantages
from trl_opd.batch import Completion, Rollout, ScoredBatch, pad_right
from trl_opd.teachers import ModelTeacher

from .helpers import make_model, make_tokenizer, make_trainer

CPU = torch.device("cpu")
F, T = False, True
HIT, MISS = math.log(5 / 8), math.log(1 / 8)


def completion(ids: list[int], *, stopped: bool = True) -> Completion:
    """A completion whose log-probs are -1, -2, ..."""
    return Completion(ids=ids, logps=[-float(t + 1) for t in range(len(ids))], stopped=stopped)


def build(**changes: Any) -> Rollout:
    """Two rows: a prompt of three tokens with a stopped completion of two, one of one token with a cut one of three."""
    arguments: dict[str, Any] = {
        "prompts": [[5, 1, 7], [8]],
        "completions": [completion([3, 1]), completion([4, 0, 9], stopped=False)],
        "rows": [{"prompt": "a"}, {"prompt": "b"}],
        "pad_id": 0,
        "device": CPU,
    }
    return Rollout.build(**{**arguments, **changes})


def scored(rollout: Rollout) -> ScoredBatch:
    """A batch whose values tell their row and position apart."""
    values = torch.arange(rollout.ids_BT.numel(), dtype=torch.float32).view_as(rollout.ids_BT)
    return ScoredBatch.of(rollout, -values, torch.arange(len(rollout)) + 0.5, values / 7)


# ---- Rollout


def test_a_rollout_built_by_hand() -> None:
    """The prompt holds the stop token's id 1 and a completion the pad id 0; neither changes a mask."""
    rollout = build()
    assert rollout.ids_BT.tolist() == [[5, 1, 7, 3, 1], [8, 4, 0, 9, 0]]
    assert rollout.attention_mask_BT.tolist() == [[T, T, T, T, T], [T, T, T, T, F]]
    assert rollout.mask_BT.tolist() == [[F, F, F, T, T], [F, T, T, T, F]]
    assert rollout.sampled_logps_BT.tolist() == [[0, 0, 0, -1, -2], [0, -1, -2, -3, 0]]
    assert rollout.prompt_lengths_B.tolist() == [3, 1] and rollout.completion_lengths_B.tolist() == [2, 3]
    assert rollout.stopped_B.tolist() == [T, F]
    assert len(rollout) == 2 and rollout.rows == ({"prompt": "a"}, {"prompt": "b"}) and rollout.teacher_prompts is None
    assert (rollout.ids_BT.dtype, rollout.sampled_logps_BT.dtype) == (torch.long, torch.float32)
    assert rollout.mask_BT.dtype == rollout.attention_mask_BT.dtype == torch.bool


@pytest.mark.parametrize("pad_id", [0, 1, 7, 9])
def test_masks_do_not_depend_on_the_pad_id(pad_id: int) -> None:
    """Whatever token pads, only the padding itself holds another id."""
    one, other = build(), build(pad_id=pad_id)
    assert other.ids_BT[~one.attention_mask_BT].tolist() == [pad_id]
    assert torch.equal(one.ids_BT[one.attention_mask_BT], other.ids_BT[one.attention_mask_BT])
    assert torch.equal(one.mask_BT, other.mask_BT) and torch.equal(one.attention_mask_BT, other.attention_mask_BT)


def test_a_cut_completion_can_be_left_out() -> None:
    """Its tokens are no actions then, but stay in the sequence with their length."""
    rollout = build(mask_truncated=True)
    assert rollout.mask_BT.tolist() == [[F, F, F, T, T], [F, F, F, F, F]]
    assert rollout.attention_mask_BT.tolist() == build().attention_mask_BT.tolist()
    assert rollout.completion_lengths_B.tolist() == [2, 3]


def test_completion_ids_are_what_was_built_from() -> None:
    """Pad and stop ids inside them included."""
    assert build().completion_ids() == [[3, 1], [4, 0, 9]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completions": [completion([3])]}, "2 prompts came with 1 completions"),
        ({"rows": [{}, {}, {}]}, "2 prompts came with 3 dataset rows"),
        ({"teacher_prompts": [[1], [2], [3]]}, "2 prompts came with 3 teacher prompts"),
        (
            {"completions": [completion([3]), Completion(ids=[4, 5, 6], logps=[-1.0, -2.0], stopped=True)]},
            "3 token ids of completion 1 came with 2 log-probs",
        ),
    ],
)
def test_lengths_that_differ_are_both_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_other_sampled_logps_make_another_rollout() -> None:
    """The first keeps its own; a wrong shape names both."""
    rollout = build()
    other = rollout.with_sampled_logps(torch.full((2, 5), -9.0))
    assert other.sampled_logps_BT.eq(-9).all() and rollout.sampled_logps_BT[0, 3] == -1
    assert torch.equal(other.ids_BT, rollout.ids_BT)
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 5\)"):
        rollout.with_sampled_logps(torch.zeros(2, 4))


def test_padding_on_the_right() -> None:
    padded = pad_right([[1.0], [2.0, 3.0], []], -1.0, torch.float64, CPU)
    assert padded.tolist() == [[1, -1], [2, 3], [-1, -1]] and padded.dtype == torch.float64


# ---- ScoredBatch


def test_shapes_of_scores_are_checked() -> None:
    """A (B, T - 1) tensor of a shift done twice is the usual mistake."""
    rollout = build()
    with pytest.raises(ValueError, match=r"teacher log-probs has shape \(2, 4\).*\(2, 5\)"):
        ScoredBatch.of(rollout, torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"advantages has shape \(5, 2\).*\(2, 5\)"):
        ScoredBatch.of(rollout, torch.zeros(2, 5), torch.zeros(2), torch.zeros(5, 2))


def test_parts_of_a_batch_are_cut_to_their_own_longest_row() -> None:
    """Rows of 5, 4, 2 and 3 tokens in parts of one, two and one."""
    rollout = build(
        prompts=[[5, 1, 7], [8], [6], [2, 2]],
        completions=[completion([3, 1]), completion([4, 0, 9], stopped=False), completion([1]), completion([7])],
        rows=[{}] * 4,
    )
    batch = scored(rollout)
    parts = batch.split([1, 2, 1])
    assert [tuple(part.ids_BT.shape) for part in parts] == [(1, 5), (2, 4), (1, 3)]
    assert [len(part) for part in parts] == [1, 2, 1]
    assert parts[1].ids_BT.tolist() == [[8, 4, 0, 9], [6, 1, 0, 0]]
    assert parts[1].mask_BT.tolist() == [[F, T, T, T], [F, T, F, F]]
    assert parts[1].teacher_logps_BT.tolist() == [[-5, -6, -7, -8], [-10, -11, -12, -13]]
    assert parts[1].reward_advantages_B.tolist() == [1.5, 2.5] and parts[2].reward_advantages_B.tolist() == [3.5]
    assert sum(int(part.mask_BT.sum()) for part in parts) == int(batch.mask_BT.sum()) == 7


def test_parts_keep_rows_that_are_not_trained_on() -> None:
    """A cut completion off the action mask still needs its columns: the rows' own length counts, not the mask's."""
    parts = scored(build(mask_truncated=True)).split([1, 1])
    assert parts[1].ids_BT.tolist() == [[8, 4, 0, 9]] and not parts[1].mask_BT.any()


def test_parts_must_add_up() -> None:
    with pytest.raises(AssertionError, match="3 rows out of 2"):
        scored(build()).split([2, 1])


def test_a_batch_survives_a_checkpoint() -> None:
    """Through torch.save and a load of tensors only: the same values, types and shapes, of a part too."""
    (_, part) = scored(build()).split([1, 1])
    buffer = io.BytesIO()
    torch.save(part.state_dict(), buffer)
    buffer.seek(0)
    loaded = ScoredBatch.from_state_dict(torch.load(buffer, weights_only=True), CPU)
    for field in fields(ScoredBatch):
        one, other = getattr(part, field.name), getattr(loaded, field.name)
        if isinstance(one, Tensor):
            assert torch.equal(one, other) and one.dtype == other.dtype, field.name
        else:
            assert one == other, field.name


def test_stages_do_not_write_into_their_input() -> None:
    """Values are frozen; splitting leaves the whole as it was."""
    batch = scored(build())
    before = {name: tensor.clone() for name, tensor in batch.state_dict().items()}
    batch.split([1, 1])
    assert all(torch.equal(before[name], tensor) for name, tensor in batch.state_dict().items())
    with pytest.raises(AttributeError):
        batch.ids_BT = torch.zeros(1)  # type: ignore[misc]


def test_ragged_rows_get_the_advantages_of_each_row_alone() -> None:
    """Prompts of three and nine tokens, completions of four and two, discount 0.9; the teacher reads both in one batch."""
    prompts, completions = [[5, 6, 7], list(range(8, 17))], [completion([9, 4, 0, 1]), completion([3, 30], stopped=False)]
    teacher = ModelTeacher(make_model(1), temperature=0.8, vocab_size=43, batch_size=2)

    def advantages(rows: slice) -> tuple[Tensor, Tensor]:
        rollout = build(prompts=prompts[rows], completions=completions[rows], rows=[{}] * len(prompts[rows]))
        scores_BT = teacher.score(rollout)
        return kl_advantages(rollout.sampled_logps_BT, scores_BT, rollout.mask_BT, discount=0.9), rollout.mask_BT

    together, mask = advantages(slice(0, 2))
    for row in (0, 1):
        alone, alone_mask = advantages(slice(row, row + 1))
        torch.testing.assert_close(together[row][mask[row]], alone[0][alone_mask[0]], atol=1e-5, rtol=0)
    assert together[~mask].eq(0).all() and together[mask].abs().min() > 0


# ---- The teacher's prompt


class SumTeacher(nn.Module):
    """After a prefix, the token "sum of the prefix modulo 4" has probability 5/8 and each of the other three 1/8."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        likely = (input_ids * attention_mask).cumsum(dim=1) % 4
        return SimpleNamespace(logits=torch.where(nn.functional.one_hot(likely, 4).bool(), math.log(5.0), 0.0))


def sum_teacher(batch_size: int = 8) -> ModelTeacher:
    """The teacher above in the class that the trainer uses."""
    return ModelTeacher(SumTeacher(), temperature=1.0, vocab_size=4, batch_size=batch_size)


GOLDEN_PROMPTS = [[1, 2], [3, 3, 3], [2]]
GOLDEN_COMPLETIONS = [[3, 2, 0], [1], [2, 0, 0, 1]]
# Prefix sums of row 0: 3 -> 3 is likely, 6 -> 2, 8 -> 0. Row 1: 9 -> 1. Row 2: 2 -> 2, 4 -> 0, 4 -> 0, 4 -> 0 and not 1.
GOLDEN = [[0, 0, HIT, HIT, HIT], [0, 0, 0, HIT, 0], [0, HIT, HIT, HIT, MISS]]
TEACHER_PROMPTS = [[1, 0, 0, 3, 3], [1, 1], [3, 3, 3, 3, 3, 2]]
# Teacher's prefix sums of row 0: 7 -> 3 hit, 10 -> 2 hit, 12 -> 0 hit. Row 1: 2, not 1. Row 2: 17 -> 1 and not 2, 19 -> 3 and
# not 0, 19 likewise, 19 -> 3 and not 1.
GOLDEN_AFTER_TEACHER_PROMPTS = [[0, 0, HIT, HIT, HIT], [0, 0, 0, MISS, 0], [0, MISS, MISS, MISS, MISS]]


def golden_rollout(teacher_prompts: list[list[int]] | None = None) -> Rollout:
    """Three rows of 5, 4 and 5 tokens."""
    completions = [completion(ids) for ids in GOLDEN_COMPLETIONS]
    return build(prompts=GOLDEN_PROMPTS, completions=completions, rows=[{}] * 3, teacher_prompts=teacher_prompts)


def completion_scores(rollout: Rollout, scores_BT: Tensor) -> Tensor:
    """The scores on action tokens, 0 elsewhere."""
    return torch.where(rollout.mask_BT, scores_BT, 0.0)


def test_scores_after_the_students_prompt() -> None:
    rollout = golden_rollout()
    scores_BT = completion_scores(rollout, sum_teacher().score(rollout))
    torch.testing.assert_close(scores_BT, torch.tensor(GOLDEN), atol=1e-6, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_after_the_teachers_prompt_land_on_the_same_tokens(batch_size: int) -> None:
    """Teacher prompts that are longer and shorter than the student's; the completion keeps its place."""
    rollout = golden_rollout(TEACHER_PROMPTS)
    scores_BT = sum_teacher(batch_size).score(rollout)
    assert scores_BT.shape == rollout.ids_BT.shape
    expected = torch.tensor(GOLDEN_AFTER_TEACHER_PROMPTS)
    torch.testing.assert_close(completion_scores(rollout, scores_BT), expected, atol=1e-6, rtol=0)
    assert scores_BT[~rollout.mask_BT].eq(0).all()


def test_teacher_prompts_equal_to_the_students_change_nothing() -> None:
    rollout = golden_rollout(GOLDEN_PROMPTS)
    torch.testing.assert_close(completion_scores(rollout, sum_teacher().score(rollout)), torch.tensor(GOLDEN))


def test_a_cut_completion_off_the_mask_does_not_move_the_others() -> None:
    """Alignment goes by lengths, not by the action mask."""
    rollout = golden_rollout(TEACHER_PROMPTS)
    masked = replace(rollout, mask_BT=rollout.mask_BT & torch.tensor([[False], [True], [True]]))
    assert torch.equal(sum_teacher().score(masked), sum_teacher().score(rollout))


def test_the_trainer_gives_the_teacher_its_own_prompt(tmp_path: Path) -> None:
    """From the dataset's teacher_prompt column to the teacher's score of each token, against scoring each row alone."""
    tokenizer, teacher = make_tokenizer(), make_model(1)
    hints = [f"hint {'x' * (3 * i)}: " for i in range(4)]
    dataset = datasets.Dataset.from_dict({"prompt": ["1+1=", "a", "23+45=", "7+7"], "teacher_prompt": hints})
    trainer = make_trainer(tmp_path, teacher_model=teacher, train_dataset=dataset, processing_class=tokenizer)
    rows = list(dataset)
    rollout, scores_BT, *_ = trainer.rollout_and_scores(rows, 0)
    assert rollout.prompt_lengths_B.tolist() == [4, 1, 6, 3]
    for row, (hint, ids) in enumerate(zip(hints, rollout.completion_ids(), strict=True)):
        prompt = tokenizer(hint)["input_ids"]
        with torch.no_grad():
            logps = teacher(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(dim=-1)
        expected = [float(logps[len(prompt) + t - 1, token]) for t, token in enumerate(ids)]
        torch.testing.assert_close(scores_BT[row][rollout.mask_BT[row]], torch.tensor(expected), atol=1e-5, rtol=0)
