"""A chat template with tools for the character tokenizer of the tests, and an engine that says what it is told to."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_opd import Completion

SPECIAL = ["<pad>", "<eos>", "<u>", "<a>", "<t>", "<call>", "</call>", "<unk>"]
CHARACTERS = "0123456789+-=.,:;_'{}()? abcdefghijklmnopqrstuvwxyzT"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + ';' }}{% endfor %}"
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}"
    "{% for key, value in c.function.arguments.items() %}{{ ' ' ~ key ~ '=' ~ value }}{% endfor %}{{ '</call>' }}{% endfor %}"
    "{{ '<eos> ' if m.role != 'tool' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""Writes a space after the end of a turn, as many real templates write a newline."""
RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<a>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r" (?P<key>\w+)=(?P<value>\S+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def make_tool_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the roles, calls and the end of a turn are special tokens. "42" is a token that no text gives."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, "42"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:7],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSES
    return tokenizer


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: The number.

    Returns:
        Twice as much.
    """
    return 2 * int(x)


class OwnWeights:
    """An engine that has the trainer's own weights: nothing to publish, nothing to compare."""

    max_gap: float | None = None
    whole_softmax = True

    def sync(self, model: Any) -> None:
        """Nothing to do."""


class Scripted(OwnWeights):
    """An engine that answers each call of `generate` with the next texts of a script; log-probs count -1, -2, ...

    Args:
        tokenizer: Encodes them.
        turns: For each call, the texts; one that ends with "<eos>" is stopped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *turns: list[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.asked: list[tuple[list[list[int]], list[int], list[int]]] = []

    def generate(
        self, model: Any, prompts: list[list[int]], seeds: list[int] | None = None, limits: list[int] | None = None
    ) -> list[Completion]:
        """The next texts, each cut at its limit."""
        assert seeds is not None
        assert limits is not None
        self.asked.append((prompts, seeds, limits))
        texts = self.turns.pop(0)
        assert len(texts) == len(prompts)
        completions = []
        for text, limit in zip(texts, limits, strict=True):
            ids = self.tokenizer(text)["input_ids"][:limit]
            stopped = ids[-1] == self.tokenizer.eos_token_id
            completions.append(Completion(ids, [-1.0 - t for t in range(len(ids))], stopped))
        return completions
