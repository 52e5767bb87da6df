"""What is asked of a teacher's server before training: is it the model that was meant, can it score what will be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import prompt_limit, warn
from ..config import OnPolicyDistillationConfig
from ..servers import BadAnswer, RequestRefused, ServerError, Servers
from .server import PATH, ServerTeacher, prompt_entries, prompt_logps, scoring_request

SENTENCE = 'On 3 May, 17 of 24 owls (71%) flew; "why?" asked Zoë: f(x) = x**2 + 0.5\n\n'
NUM_TOKENS, NUM_SCORED = 4096, 16
"""How many of the vocabulary's tokens, besides, the tokenizers are compared on, and how many ids are scored."""
SAME = 0.2
"""Mean nats a token by which scores of one text may differ, as those in 16 bits do between batches."""
LORA_HINT = (
    "Is it started with --enable-lora? vLLM (0.32) then fails so if it adapts the language head too; leave that out with "
    "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, or the layers that the adapters have."
)
"""Against https://github.com/vllm-project/vllm/issues/16668, which strikes with no adapter loaded, too."""


def server_teacher(
    urls: Sequence[str],
    student: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    args: OnPolicyDistillationConfig,
) -> ServerTeacher:
    """A teacher on the servers at `urls`, probed.

    Raises:
        ValueError: If a server is not fit to score what this student writes; the message names what does not match.
        ServerError: If one cannot be reached within `args.vllm_server_timeout`, or refuses.
    """
    servers = Servers(urls, timeout=args.vllm_server_timeout)
    model = _served_model(servers)
    _check_context(servers, model, student, args)
    ids, scores = ids_of(tokenizer, SENTENCE)[:NUM_SCORED], []
    for url in servers.urls:
        one = Servers([url], timeout=args.vllm_server_timeout)
        _check_tokenizer(one, model, tokenizer)
        scores.append(_check_scores(one, model, ids))
        _check_many_at_once(one, model, ids, scores[-1])
        _check_temperature(one, model, ids, args.temperature)
    _check_alike(servers, scores)
    return ServerTeacher(servers, model, temperature=args.temperature)


def _served_model(servers: Servers) -> str:
    """The name that every replica serves: the URL's, else the first."""
    names = [[card["id"] for card in answer["data"]] for answer in servers.get("/v1/models")]
    if servers.model is None and len({found[0] for found in names}) > 1:
        raise ValueError(
            f"The servers {servers.urls} serve different models: {[found[0] for found in names]}. A list of servers means "
            "replicas of one model; name it as in 'http://host:port#name'."
        )
    model = servers.model or names[0][0]
    for url, found in zip(servers.urls, names, strict=True):
        if model not in found:
            raise ValueError(f"The server {url} does not serve '{model}'; it serves {found}. Name one after the URL's '#'.")
    return model


def _check_context(
    servers: Servers, model: str, student: PreTrainedModel | PeftModel, args: OnPolicyDistillationConfig
) -> None:
    """Raises ValueError if the longest text that can be written does not fit, with the token that a server must generate."""
    limit = prompt_limit(student, args)
    needed = limit + args.max_completion_length + 1
    if args.max_prompt_length is None:
        needed -= 1  # equal contexts are fine: no prompt is likely to fill the student's to the last token
    for url, answer in zip(servers.urls, servers.get("/v1/models"), strict=True):
        room = _max_model_len(answer["data"], model)
        if room is not None and room < needed:
            raise ValueError(
                f"The server {url} reads at most {room} tokens (max_model_len of '{model}'), but prompts of up to {limit}, "
                f"completions of up to {args.max_completion_length} and the one token that it generates itself need more. "
                "Start it with a larger --max-model-len, or set max_prompt_length to at most "
                f"{room - args.max_completion_length - 1}."
            )


def _max_model_len(cards: list[dict[str, Any]], model: str) -> int | None:
    """Of an adapter, which has none itself, that of its base. None if the server does not say."""
    by_name = {card["id"]: card for card in cards}
    card = by_name[model]
    return card.get("max_model_len") or by_name.get(card.get("parent") or "", {}).get("max_model_len")


def _check_tokenizer(server: Servers, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if a text that holds much of the vocabulary has other ids on the server."""
    text = _probe_text(tokenizer)
    ours = ids_of(tokenizer, text)
    request = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        theirs = server.ask("/tokenize", request, lambda answer: [int(i) for i in answer["tokens"]])
    except RequestRefused as refused:
        if refused.status != 404:
            raise
        warn(f"{server.urls[0]} has no /tokenize: it was not checked that its ids mean the same tokens as the student's.")
        return
    if ours != theirs:
        pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=False) if mine != other]
        examples = "; ".join(
            f"{tokenizer.convert_ids_to_tokens(mine)!r} is id {mine} to the student, {other} on the server"
            for mine, other in list(dict.fromkeys(pairs))[:3]
        )
        raise ValueError(
            f"The student's tokenizer and that of '{model}' on {server.urls[0]} differ: a text of {len(ours)} ids has "
            f"{len(theirs)} there. {examples or 'One continues where the other ends'}. The teacher scores the ids the student "
            "wrote, so that both must read the same text in them. Choose a teacher of the same model family."
        )


def _probe_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence, tokens from all over the vocabulary, and the stop token; other special tokens may well differ."""
    special = set(tokenizer.all_special_ids) | set(cast(Any, tokenizer).get_added_vocab().values())
    ordinary = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    step = max(1, len(ordinary) // NUM_TOKENS)
    tokens = [str(tokenizer.decode([i])) for i in ordinary[::step]]
    return f"{SENTENCE}{' '.join(tokens)} {tokenizer.eos_token or ''}"


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, no special tokens added."""
    return list(cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"]))


def _check_scores(server: Servers, model: str, ids: list[int]) -> np.ndarray:
    """Raises ValueError unless log-probs of just these ids come back; returns them."""
    answer = server.ask(PATH, scoring_request(model, ids, 1.0, num_top=1), lambda answer: answer)
    try:
        entries = prompt_entries(answer, ids)[1:]
    except (BadAnswer, LookupError, TypeError) as bad:
        raise ValueError(
            f"'{model}' on {server.urls[0]} cannot be a teacher: it answered a request for the log-probs of {len(ids)} ids "
            f"{bad if isinstance(bad, BadAnswer) else f'without them ({bad!r})'}. It must be a vLLM server that honours "
            "prompt_logprobs."
        ) from bad
    total = max(sum(np.exp(list(entry.values()))) for entry in entries)
    scores = np.array([entry[str(i)] for entry, i in zip(entries, ids[1:], strict=True)])
    if not np.isfinite(scores).all() or total > 1.01:
        raise ValueError(
            f"What '{model}' on {server.urls[0]} returns for a sentence are no log-probs: {scores.round(2).tolist()}, and the "
            f"probabilities of one position add up to {total:.2f}. Is it started with --logprobs-mode raw_logprobs?"
        )
    return scores


def _check_many_at_once(server: Servers, model: str, ids: list[int], alone: np.ndarray) -> None:
    """Raises unless sequences of several lengths that are asked for together are scored as each alone."""
    parts = [ids[: len(ids) - cut] for cut in (0, 0, *range(len(ids) // 2))]
    requests = [scoring_request(model, part, 1.0) for part in parts]
    try:
        answers = server.ask_all(PATH, requests, lambda number, answer: prompt_logps(answer, parts[number], 1))
    except ServerError as error:
        raise ServerError(
            f"{server.urls[0]} scored one sequence, but failed with {len(parts)} at once. {LORA_HINT} ({error})"
        ) from error
    gap = max(float(np.abs(np.array(scores) - alone[: len(scores)]).mean()) for scores in answers)
    if gap > SAME:
        raise ValueError(
            f"'{model}' on {server.urls[0]} scores a sentence {gap:.2f} nats a token otherwise when it is asked for several "
            f"at once. {LORA_HINT}"
        )


def _check_temperature(server: Servers, model: str, ids: list[int], temperature: float) -> None:
    """Raises ValueError unless the server scores at `temperature`.

    The difference of two log-probs of one position is divided by the temperature; the rest of the distribution plays no part.
    """
    if temperature == 1:
        return
    at_one, at_ours = (
        sum(
            max(entry.values()) - entry[str(i)]
            for entry, i in zip(server.ask(PATH, request, lambda a: prompt_entries(a, ids))[1:], ids[1:], strict=True)
        )
        for request in (scoring_request(model, ids, t, num_top=1) for t in (1.0, temperature))
    )
    if not abs(at_one - temperature * at_ours) < 0.1 * abs(at_one - at_one * temperature):
        raise ValueError(
            f"temperature is {temperature}, but '{model}' on {server.urls[0]} does not score at it: vLLM scores the tokens of "
            "a prompt at 1 whatever is asked, so that student and teacher would be compared at different ones. Set "
            "temperature to 1, or load the teacher in the training process."
        )


def _check_alike(servers: Servers, scores: list[np.ndarray]) -> None:
    """Raises ValueError if replicas score a sentence differently."""
    for url, other in zip(servers.urls, scores, strict=True):
        if (gap := np.abs(other - scores[0]).mean()) > SAME:
            raise ValueError(
                f"The servers {servers.urls[0]} and {url} differ by {gap:.2f} nats a token on a sentence, but a list of "
                "servers means replicas of one teacher. Do both serve the same weights?"
            )
