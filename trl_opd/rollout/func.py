"""Rollouts by a user's own loop, `rollout_func`: what it returns, checked and turned into completions.

The names are those of TRL's `GRPOTrainer`. Two things differ: `prompts` holds a prompt as often as it has completions, so that
the function returns one trajectory for each; and `logprobs` may be left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

from ..batch import Completion

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""`rollout_func(prompts, trainer) -> dict`; see `trajectories`."""
Sampled = tuple[list[list[int]], list[Completion], list[dict[str, Any]]]
"""Prompts, their completions, and the rows of both."""
REQUIRED = ("prompt_ids", "completion_ids")
OURS = (*REQUIRED, "logprobs", "env_mask", "stopped")
TAKEN = ("prompt", "prompts", "completion", "completions")


def trajectories(
    returned: Any, rows: Sequence[dict[str, Any]], *, stop_ids: Sequence[int], vocab_size: int, context: int | None
) -> Sampled:
    """Prompts, completions and rows of what a `rollout_func` returned.

    Its keys, each a list of one entry for each prompt it was given:

    - `prompt_ids`: token ids of the prompt.
    - `completion_ids`: token ids of all that follows: every turn of the student, and what stands between them.
    - `env_mask` (optional): 1 on tokens the student sampled, 0 on others (a tool's output). Without it all are the student's.
    - `logprobs` (optional): the log-prob of each token, in nats, at the temperature of the settings, under the distribution it
      was sampled from; whatever stands where `env_mask` is 0 is ignored. Left out, None or empty, the student as it is now
      computes them, which is right if it wrote the completions since its last update.
    - `stopped` (optional): whether the trajectory came to its end, or was cut at a limit. Without it: whether the last token
      the student sampled is a stop token.
    - Any other key is a column for reward functions, as if the dataset had it.

    Args:
        returned: What the function returned.
        rows: The dataset rows it was called for.
        stop_ids: Token ids that end a completion.
        vocab_size: Number of ids the policy ranges over.
        context: Most tokens the student can read; None for any number.

    Returns:
        As many prompts, completions and rows; log-probs that were left out are NaN.

    Raises:
        ValueError: If a key is missing, or lengths or types do not fit.
    """
    if not isinstance(returned, dict):
        raise ValueError(f"rollout_func returned a {type(returned).__name__}; it must return a dict of lists, as in TRL.")
    if missing := [key for key in REQUIRED if key not in returned]:
        raise ValueError(f"rollout_func returned the keys {sorted(returned)}, but not {missing}, which are needed.")
    columns = {key: returned[key] for key in returned if key not in OURS}
    if taken := [key for key in columns if key in TAKEN]:
        raise ValueError(f"rollout_func returned {taken}, which reward functions get already. Give them other names.")
    lists = {key: _rows_of(key, value, len(rows)) for key, value in returned.items() if value is not None}
    prompts = [_ids(lists["prompt_ids"][row], f"prompt_ids[{row}]", vocab_size) for row in range(len(rows))]
    completions = [_completion(lists, row, stop_ids, vocab_size) for row in range(len(rows))]
    longest = max(len(prompt) + len(c.ids) for prompt, c in zip(prompts, completions, strict=True))
    if context is not None and longest > context:
        raise ValueError(
            f"rollout_func returned a trajectory of {longest} tokens (prompt and completion), but the student's context is "
            f"{context}. End trajectories before that."
        )
    more = [{key: values[row] for key, values in lists.items() if key in columns} for row in range(len(rows))]
    return prompts, completions, [with_columns(row, own) for row, own in zip(rows, more, strict=True)]


def with_columns(row: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The row, of its own class and with its seed, with further columns."""
    other = copy.copy(row)
    other.update(columns)
    return other


def _completion(lists: dict[str, list[Any]], row: int, stop_ids: Sequence[int], vocab_size: int) -> Completion:
    ids = _ids(lists["completion_ids"][row], f"completion_ids[{row}]", vocab_size)
    mask = None
    if "env_mask" in lists:
        mask = _values(lists["env_mask"][row], len(ids), f"env_mask[{row}]")
        if wrong := [value for value in mask if value not in (0, 1)]:
            raise ValueError(f"rollout_func: env_mask[{row}] holds {wrong[0]!r}; it must hold 1 (sampled) and 0 (not) only.")
        mask = [bool(value) for value in mask]
    actions = [True] * len(ids) if mask is None else mask
    logps = [float("nan")] * len(ids)
    if "logprobs" in lists:
        given = _values(lists["logprobs"][row], len(ids), f"logprobs[{row}]")
        logps = [_logp(value, row) if action else 0.0 for value, action in zip(given, actions, strict=True)]
    sampled = [token for token, action in zip(ids, actions, strict=True) if action]
    stopped = bool(lists["stopped"][row]) if "stopped" in lists else bool(sampled) and sampled[-1] in stop_ids
    return Completion(ids=ids, logps=logps, stopped=stopped, mask=mask)


def _rows_of(key: str, value: Any, count: int) -> list[Any]:
    values = _plain(value)
    if not isinstance(values, list):
        raise ValueError(f"rollout_func: {key} is a {type(value).__name__}; it must be a list with one entry for each prompt.")
    if len(values) != count and not (key == "logprobs" and not values):
        raise ValueError(
            f"rollout_func returned {len(values)} {key} for {count} prompts; there must be one for each. (Each prompt stands "
            "in the list as often as it has completions.)"
        )
    return values


def _ids(value: Any, name: str, vocab_size: int) -> list[int]:
    ids = _plain(value)
    if not isinstance(ids, list) or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"rollout_func: {name} is {value!r:.200}; it must be a list of token ids (whole numbers).")
    if not ids:
        raise ValueError(
            f"rollout_func: {name} is empty; there must be at least one token. A trajectory that should not be trained on "
            "gets an env_mask of zeros."
        )
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(f"rollout_func: {name} holds the id {wrong[0]}, but the tokenizer's are 0 to {vocab_size - 1}.")
    return [int(token) for token in ids]


def _values(value: Any, count: int, name: str) -> list[Any]:
    values = _plain(value)
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, list) else f"a {type(value).__name__}"
        raise ValueError(f"rollout_func: {name} has {found} for {count} completion_ids; there must be one for each.")
    return values


def _logp(value: Any, row: int) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(
            f"rollout_func: logprobs[{row}] holds {value!r:.200} on a token the student sampled; it must be one finite number "
            "(nats) a token. Leave `logprobs` out where they are not known, and the student computes them."
        )
    return float(value)


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
