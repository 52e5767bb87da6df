"""Rollout and ScoredBatch: the vocabulary that the stages of a step share.

Shapes: B sequences (completions), T tokens of the padded sequence. A row is its prompt, then its completion, then padding:
padding stands on the right only. Every (B, T) tensor belongs to `ids_BT`: the value at t is that of token t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .rows import Filler


@dataclass(frozen=True)
class ToolUse:
    """What a completion of several turns did with tools."""

    messages: list[dict[str, Any]]
    """The assistant's turns, with their `tool_calls`, and the tools' answers, in order."""
    calls: int
    failures: int
    """Calls that were answered with an error."""


@dataclass(frozen=True)
class Completion:
    """What a rollout engine returns for one prompt."""

    ids: list[int]
    """The sampled tokens, the stop token included; of several turns, what stands between them too."""
    logps: list[float]
    """Nats, one for each of `ids`, under the distribution it was sampled from; what stands off the mask is ignored."""
    stopped: bool
    """True if it ended with a stop token, False if it was cut at the length limit."""
    mask: list[bool] | None = None
    """One for each of `ids`: False where the student did not sample it (a tool's output, another's turn). None: all True."""
    tool_use: ToolUse | None = None
    """Where there are tools."""

    @property
    def actions(self) -> list[bool]:
        """`mask`, written out."""
        return [True] * len(self.ids) if self.mask is None else [bool(action) for action in self.mask]


@dataclass(frozen=True)
class Rollout:
    """Completions the student sampled, each with its prompt, as padded tensors on the training device."""

    ids_BT: Tensor
    attention_mask_BT: Tensor
    """True on prompt and completion, False on padding."""
    mask_BT: Tensor
    """The action mask: True on sampled tokens that are trained on."""
    sampled_logps_BT: Tensor
    """Nats, fp32; 0 on what the student did not sample."""
    prompt_lengths_B: Tensor
    completion_lengths_B: Tensor
    """Tokens, whether they are trained on or not."""
    stopped_B: Tensor
    prompt_cut_B: Tensor
    """True where the prompt was longer than `max_prompt_length`."""
    rows: tuple[dict[str, Any], ...]
    """The dataset row behind each sequence."""
    teacher_prompts: tuple[list[int], ...] | None = None
    """Token ids of the prompt the teacher sees in place of the student's, where it has its own."""
    tool_use: tuple[ToolUse, ...] | None = None
    """Where there are tools."""

    def __len__(self) -> int:
        return len(self.ids_BT)

    @classmethod
    def build(
        cls,
        prompts: Sequence[list[int]],
        completions: Sequence[Completion],
        rows: Sequence[dict[str, Any]],
        *,
        pad_id: int,
        device: torch.device,
        teacher_prompts: Sequence[list[int]] | None = None,
        mask_truncated: bool = False,
        prompt_cut: Sequence[bool] | None = None,
    ) -> Rollout:
        """Pads ragged prompts and completions. The masks come from the lengths, so that the pad id may be any id.

        Raises:
            ValueError: If prompts, completions, log-probs and rows differ in number; both numbers are in the message.
        """
        _same_length("prompts", prompts, "completions", completions)
        _same_length("prompts", prompts, "dataset rows", rows)
        if teacher_prompts is not None:
            _same_length("prompts", prompts, "teacher prompts", teacher_prompts)
        for number, completion in enumerate(completions):
            _same_length(f"token ids of completion {number}", completion.ids, "log-probs", completion.logps)
            _same_length(f"token ids of completion {number}", completion.ids, "mask values", completion.actions)
        tool_use = [completion.tool_use for completion in completions if completion.tool_use is not None]
        if tool_use:
            _same_length("completions", completions, "records of tool use", tool_use)

        pairs = list(zip(prompts, completions, strict=True))
        ids = [prompt + completion.ids for prompt, completion in pairs]
        actions = [[False] * len(prompt) + completion.actions for prompt, completion in pairs]
        logps = [[0.0] * len(prompt) + _sampled(completion) for prompt, completion in pairs]
        prompt_lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        completion_lengths_B = torch.tensor([len(completion.ids) for completion in completions], device=device)
        stopped_B = torch.tensor([completion.stopped for completion in completions], device=device)
        prompt_cut_B = torch.tensor([False] * len(ids) if prompt_cut is None else prompt_cut, device=device)
        ids_BT = pad_right(ids, pad_id, torch.long, device)
        position_T = torch.arange(ids_BT.shape[1], device=device)
        attention_mask_BT = position_T < (prompt_lengths_B + completion_lengths_B)[:, None]
        mask_BT = pad_right(actions, False, torch.bool, device)
        if mask_truncated:
            mask_BT &= stopped_B[:, None]
        return cls(
            ids_BT=ids_BT,
            attention_mask_BT=attention_mask_BT,
            mask_BT=mask_BT,
            sampled_logps_BT=pad_right(logps, 0.0, torch.float32, device),
            prompt_lengths_B=prompt_lengths_B,
            completion_lengths_B=completion_lengths_B,
            stopped_B=stopped_B,
            prompt_cut_B=prompt_cut_B,
            rows=tuple(rows),
            teacher_prompts=None if teacher_prompts is None else tuple(teacher_prompts),
            tool_use=tuple(tool_use) or None,
        )

    def completion_ids(self) -> list[list[int]]:
        """Each row's tokens after the prompt, without padding: what the student sampled and what stands between its turns."""
        starts, lengths = self.prompt_lengths_B.tolist(), self.completion_lengths_B.tolist()
        return [ids[start : start + length] for ids, start, length in zip(self.ids_BT.tolist(), starts, lengths, strict=True)]

    def with_sampled_logps(self, sampled_logps_BT: Tensor) -> Rollout:
        """The same sequences with other log-probs of their tokens."""
        check_shape("sampled_logps", sampled_logps_BT, self.ids_BT)
        return replace(self, sampled_logps_BT=sampled_logps_BT)

    def without_fillers(self) -> Rollout:
        """The same sequences; of rows that only fill up the share of this process, no token is an action."""
        return replace(self, mask_BT=self.mask_BT & self.real_B[:, None])

    @property
    def real_B(self) -> Tensor:
        """False on fillers."""
        return torch.tensor([not isinstance(row, Filler) for row in self.rows], device=self.ids_BT.device)

    def __getitem__(self, where_B: Tensor) -> Rollout:
        """The sequences where `where_B` is True."""
        kept = where_B.nonzero().flatten().tolist()
        tensors = {f.name: value[where_B] for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        names = ("rows", "teacher_prompts", "tool_use")
        lists = {name: tuple(value[i] for i in kept) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **tensors, **lists)

    def with_stub(self) -> Rollout:
        """The same sequences and, after them, one of two tokens that no one needs: the shortest a model can score."""
        completion = Completion(ids=[0], logps=[0.0], stopped=False)
        stub = Rollout.build([[0]], [completion], [Filler()], pad_id=0, device=self.ids_BT.device)
        tensors: dict[str, Tensor] = {}
        for name in (f.name for f in fields(self)):
            if isinstance(value := getattr(self, name), Tensor):
                row = value.new_zeros(1, *value.shape[1:])
                row[..., : 2 if value.dim() == 2 else None] = getattr(stub, name)
                tensors[name] = torch.cat([value, row])
        prompts = None if self.teacher_prompts is None else (*self.teacher_prompts, [0])
        return replace(self, **tensors, rows=(*self.rows, *stub.rows), teacher_prompts=prompts)


@dataclass(frozen=True)
class TeacherStates:
    """What teachers' heads got before each action token."""

    by_sequence: tuple[Tensor, ...]
    """(n, K) for each sequence, n being its action tokens and K its teacher's width."""
    teacher_B: Tensor
    """Number of each sequence's teacher."""

    def __getitem__(self, numbers_N: Tensor) -> TeacherStates:
        """Those of some sequences."""
        return TeacherStates(tuple(self.by_sequence[number] for number in numbers_N.tolist()), self.teacher_B[numbers_N])

    def to(self, device: torch.device | str) -> TeacherStates:
        """The same on another device."""
        return TeacherStates(tuple(states.to(device) for states in self.by_sequence), self.teacher_B.to(device))


@dataclass(frozen=True)
class ScoredBatch:
    """A rollout, or a part of it, with all that training needs: computed once, not changed after."""

    ids_BT: Tensor
    attention_mask_BT: Tensor
    mask_BT: Tensor
    sampled_logps_BT: Tensor
    teacher_logps_BT: Tensor
    reward_advantages_B: Tensor
    advantages_BT: Tensor
    states: TeacherStates | None = None
    """Of an objective over all next tokens."""
    row_sizes: tuple[int, ...] = ()
    """How many consecutive sequences share each row of the forward pass; empty until that is planned."""

    def __len__(self) -> int:
        return len(self.ids_BT)

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        teacher_logps_BT: Tensor,
        reward_advantages_B: Tensor,
        advantages_BT: Tensor,
        states: TeacherStates | None = None,
    ) -> ScoredBatch:
        """A rollout with its scores, whose shapes are checked."""
        check_shape("teacher log-probs", teacher_logps_BT, rollout.ids_BT)
        check_shape("advantages", advantages_BT, rollout.ids_BT)
        return cls(
            ids_BT=rollout.ids_BT,
            attention_mask_BT=rollout.attention_mask_BT,
            mask_BT=rollout.mask_BT,
            sampled_logps_BT=rollout.sampled_logps_BT,
            teacher_logps_BT=teacher_logps_BT,
            reward_advantages_B=reward_advantages_B,
            advantages_BT=advantages_BT,
            states=states,
        )

    def part(self, rows: Sequence[Sequence[int]]) -> ScoredBatch:
        """The sequences of these rows, as `plan_passes` gives them, cut to the longest; without any, one that adds nothing."""
        sizes, numbers = tuple(len(members) for members in rows), [number for members in rows for number in members]
        part = self._where(torch.tensor(numbers or [0], device=self.ids_BT.device))
        return replace(part, row_sizes=sizes) if numbers else replace(part, mask_BT=torch.zeros_like(part.mask_BT))

    def _where(self, numbers_N: Tensor) -> ScoredBatch:
        width = int(self.attention_mask_BT[numbers_N].sum(dim=1).max())
        tensors: dict[str, Any] = {name: tensor[numbers_N] for name, tensor in self._tensors().items()}
        tensors = {name: t[:, :width] if t.dim() == 2 else t for name, t in tensors.items()}
        return ScoredBatch(**tensors, states=None if self.states is None else self.states[numbers_N])

    @property
    def rows(self) -> list[range] | None:
        """Numbers of the sequences in each row of the forward pass, if it was planned."""
        ends = list(accumulate(self.row_sizes))
        return [range(end - size, end) for size, end in zip(self.row_sizes, ends, strict=True)] or None

    def split(self, sizes: Sequence[int]) -> list[ScoredBatch]:
        """Consecutive parts of `sizes` rows, each cut to its own longest row."""
        assert sum(sizes) == len(self), f"parts of {sum(sizes)} rows out of {len(self)}"
        ends, numbers_B = list(accumulate(sizes)), torch.arange(len(self), device=self.ids_BT.device)
        return [self._where(numbers_B[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The tensors by name, for a checkpoint."""
        states = None if self.states is None else self.states.to("cpu")
        kept = {} if states is None else {"states": (states.by_sequence, states.teacher_B)}
        return {**{name: tensor.cpu() for name, tensor in self._tensors().items()}, **kept}

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> ScoredBatch:
        """The inverse of `state_dict`."""
        states = TeacherStates(*state["states"]).to(device) if "states" in state else None
        return cls(**{name: value.to(device) for name, value in state.items() if name != "states"}, states=states)


def pad_right(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stacks ragged rows into (B, T), filled up with `value` on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype, device=device)


def check_shape(name: str, tensor: Tensor, ids_BT: Tensor) -> None:
    """Raises ValueError if `tensor` does not belong to `ids_BT` position by position."""
    if tensor.shape != ids_BT.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the token ids have {tuple(ids_BT.shape)}.")


def _sampled(completion: Completion) -> list[float]:
    """The log-probs of actions, 0 elsewhere, where a user's own loop may have left anything."""
    return [float(logp) if action else 0.0 for logp, action in zip(completion.logps, completion.actions, strict=True)]


def _same_length(name: str, one: Sequence[Any], other_name: str, other: Sequence[Any]) -> None:
    if len(one) != len(other):
        raise ValueError(f"{len(one)} {name} came with {len(other)} {other_name}; there must be one for each.")
