"""Rewards of completions and their part of the advantage. Independent of the teacher."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import ToolUse

RewardFunc = Callable[..., Sequence[float | None]]
"""`reward(prompts, completions, **columns) -> list of float or None`, as in TRL: keyword lists of equal length."""


def compute_rewards(
    reward_funcs: Sequence[RewardFunc],
    rows: Sequence[dict[str, Any]],
    completion_texts: Sequence[str],
    completion_ids: Sequence[list[int]],
    tool_use: Sequence[ToolUse] | None = None,
    **more: Any,
) -> Tensor:
    """Calls each function once on all completions.

    A function gets `prompts`, `completions`, `completion_ids`, each column of the dataset and `more`, as far as it has
    parameters for them. Completions of conversational prompts are lists of one assistant message; where there are tools
    (`tool_use`), of all the turns.

    Returns:
        (B, F) rewards, float64; NaN where a function returned None (it does not apply to that row).

    Raises:
        ValueError: If a function lacks a column it needs, or does not return one finite value or None for each completion.
    """
    completions = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, completion_texts, strict=True)
    ]
    if tool_use is not None:
        completions = [use.messages for use, _ in zip(tool_use, rows, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion"))  # in order
    columns = {name: [row.get(name) for row in rows] for name in names}
    arguments = {
        **columns,
        **more,
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": list(completion_ids),
    }
    rewards = [_call(func, arguments, len(rows)) for func in reward_funcs]
    return torch.tensor(rewards, dtype=torch.float64).view(len(reward_funcs), len(rows)).T


def reward_advantages(rewards_BF: Tensor, weights: Sequence[float], num_generations: int, scale: str) -> Tensor:
    """Weighted rewards, centred on their group of `num_generations` consecutive rows.

    Args:
        rewards_BF: (B, F), NaN where a function does not apply.
        weights: One for each function.
        num_generations: Completions per prompt; divides B.
        scale: "none", or divide by the standard deviation of the "group" or of the "batch" (plus 1e-4).

    Returns:
        (B,). A row to which no function applies gets 0 and is left out of its group's mean.
    """
    total_B = weighted_rewards(rewards_BF, weights)
    groups_NG = total_B.view(-1, num_generations)
    centred_B = (groups_NG - groups_NG.nanmean(dim=1, keepdim=True)).flatten()
    if scale == "group":
        deviation_N1 = centred_B.view_as(groups_NG).square().nanmean(dim=1, keepdim=True).sqrt()
        centred_B = centred_B / (deviation_N1.expand_as(groups_NG).flatten() + 1e-4)
    elif scale == "batch":
        centred_B = centred_B / (_deviation(total_B) + 1e-4)
    return centred_B.nan_to_num(nan=0.0)


def weighted_rewards(rewards_BF: Tensor, weights: Sequence[float]) -> Tensor:
    """(B,) sums of weight x reward over the functions that apply; NaN where none does."""
    weighted_BF = rewards_BF * torch.tensor(weights, dtype=rewards_BF.dtype)
    return torch.where(rewards_BF.isnan().all(dim=1), torch.nan, weighted_BF.nansum(dim=1))


def reward_names(funcs: Sequence[RewardFunc]) -> list[str]:
    """The names metrics use: the function's, or the class's of a callable object or a partial; same names are numbered."""
    names = [_name(func) for func in funcs]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, earlier, strict=True)]


def _name(func: RewardFunc) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _deviation(values: Tensor) -> Tensor:
    known = values[~values.isnan()]
    return known.std(correction=0) if len(known) else values.new_zeros(())


def _call(func: RewardFunc, arguments: dict[str, Any], count: int) -> list[float]:
    name, parameters = _name(func), inspect.signature(func).parameters.values()
    keywords = [p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)]
    if missing := [p.name for p in keywords if p.default is p.empty and p.name not in arguments]:
        raise ValueError(
            f"The reward function {name} needs {missing}, but a row has only {sorted(arguments)}. Add such a column."
        )
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        arguments = {p.name: arguments[p.name] for p in keywords if p.name in arguments}
    values = func(**arguments)
    if not isinstance(values, Iterable):
        raise ValueError(
            f"The reward function {name} returned {values!r}; it must return one float or None for each completion."
        )
    rewards = [float("nan") if value is None else float(value) for value in values]
    if len(rewards) != count:
        raise ValueError(
            f"The reward function {name} returned {len(rewards)} values for {count} completions; it must return one "
            "float or None for each."
        )
    if infinite := [row for row, reward in enumerate(rewards) if math.isinf(reward)]:
        raise ValueError(
            f"The reward function {name} returned {rewards[infinite[0]]} for completion {infinite[0]}; a reward must be "
            "finite, or None where the function does not apply."
        )
    return rewards
