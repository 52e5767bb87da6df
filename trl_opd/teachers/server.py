"""A teacher that is a model on a vLLM server, asked for the log-probs of the ids the student wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import Rollout
from ..servers import BadAnswer, Servers

PATH = "/v1/completions"
RULED_OUT = -9999.0
"""How vLLM writes -inf, which JSON has no number for."""
ROUNDING = 1e-3
"""Nats by which a log-prob may exceed 0."""


class ServerTeacher:
    """Scores with an OpenAI-compatible vLLM server, of which there may be replicas.

    Each sequence is one request: the prompt the teacher sees and the completion, as ids, with `prompt_logprobs=0`, which gives
    the log-prob of each of them and no others. It is looked up by its id and kept as one float a token.

    On the wire a token costs 5 bytes to send and 73 to receive (vLLM 0.32 with SmolLM2: each position comes with its id, rank
    and text), for the prompt's tokens too. No field of the request leaves these out. Sequences that stand there several times
    are asked for once, those without an action token not at all.

    A server normalises over all rows of its model; the rows that no token has, which a teacher in process leaves out, have
    next to no probability in a trained model.

    Args:
        servers: The replicas; `probe_teacher` has checked them.
        model: Its served name.
        temperature: That of the rollouts.
    """

    def __init__(self, servers: Servers, model: str, *, temperature: float) -> None:
        self.servers, self.model, self.temperature = servers, model, temperature

    @property
    def name(self) -> str:
        """What the model card makes its name of."""
        return f"{self.servers.urls[0]}#{self.model}"

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats, fp32; see `Teacher`. 0 on rows without an action token.

        Raises:
            ServerError: If a row got no good answer within the servers' timeout, or was refused.
        """
        prompts, completions = _prompts(rollout), rollout.completion_ids()
        rows = (rollout.real_B & rollout.mask_BT.any(dim=1)).nonzero().flatten().tolist()
        first_row: dict[tuple[int, tuple[int, ...]], int] = {}
        for row in rows:
            first_row.setdefault(_key(prompts[row], completions[row]), row)
        asked = list(first_row.values())
        ids = [prompts[row] + completions[row] for row in asked]
        answers = self.servers.ask_all(
            PATH,
            [scoring_request(self.model, row_ids, self.temperature) for row_ids in ids],
            lambda number, answer: prompt_logps(answer, ids[number], len(prompts[asked[number]])),
            rows=asked,
        )
        logps = dict(zip(first_row, answers, strict=True))
        scores_BT = torch.zeros(rollout.ids_BT.shape)
        starts = rollout.prompt_lengths_B.tolist()
        for row in rows:
            values = torch.tensor(logps[_key(prompts[row], completions[row])])
            scores_BT[row, starts[row] : starts[row] + len(values)] = values
        return scores_BT.to(rollout.ids_BT.device)


def scoring_request(model: str, ids: list[int], temperature: float, num_top: int = 0) -> dict[str, Any]:
    """What asks for the log-prob of each of `ids`, and of the `num_top` likeliest at each position."""
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,  # a server generates at least one
        "prompt_logprobs": num_top,
        "temperature": temperature,
    }


def prompt_logps(answer: dict[str, Any], ids: list[int], start: int) -> list[float]:
    """The log-prob of each of `ids[start:]`, nats.

    Raises:
        BadAnswer: If the answer is not about these ids, or not made of log-probs.
    """
    return [entry[str(i)] for i, entry in zip(ids[start:], prompt_entries(answer, ids)[start:], strict=True)]


def prompt_entries(answer: dict[str, Any], ids: list[int]) -> list[dict[str, float]]:
    """For each position the log-probs that came, by id, the position's own among them; {} for the first, which has none."""
    found = answer["choices"][0]["prompt_logprobs"]
    if found is None:
        raise BadAnswer("without prompt_logprobs")
    if len(found) != len(ids):
        raise BadAnswer(f"with log-probs of {len(found)} positions for {len(ids)} ids")
    entries = [{key: _logp(value["logprob"]) for key, value in (position or {}).items()} for position in found]
    for position, (entry, own) in enumerate(zip(entries[1:], ids[1:], strict=True), start=1):
        if str(own) not in entry:
            raise BadAnswer(
                f"with the log-prob of id {', '.join(entry) or '(none)'} at position {position}, where id {own} is"
            )
    return entries


def _logp(value: float) -> float:
    if math.isnan(value) or value > ROUNDING:
        raise BadAnswer(f"with {value} for a log-prob")
    return -math.inf if value <= RULED_OUT else min(value, 0.0)


def _prompts(rollout: Rollout) -> Sequence[list[int]]:
    """What the teacher reads before each completion."""
    if rollout.teacher_prompts is not None:
        return rollout.teacher_prompts
    return [ids[:length] for ids, length in zip(rollout.ids_BT.tolist(), rollout.prompt_lengths_B.tolist(), strict=True)]


def _key(prompt: list[int], completion: list[int]) -> tuple[int, tuple[int, ...]]:
    return len(prompt), (*prompt, *completion)
