"""Dataset rows -> token ids of their prompts."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import datasets
from transformers import PreTrainedTokenizerBase

AnyDataset = TypeVar("AnyDataset", bound=datasets.Dataset | datasets.IterableDataset)


class PromptEncoder:
    """Turns the prompt of a row, a text or a list of messages, into the token ids the model continues.

    Args:
        tokenizer: The student's.
        chat_template_kwargs: Extra arguments of its chat template.
        max_length: Longest prompt in tokens; a longer one loses its beginning.
        chat_template: In place of the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None,
        max_length: int,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.max_length = max_length

    def encode(self, row: dict[str, Any], column: str = "prompt") -> list[int]:
        """The whole prompt's token ids, however long.

        Raises:
            ValueError: If the column is missing, neither text nor messages, or has no token.
        """
        if column not in row:
            raise ValueError(f"A row has no '{column}' column; it has {sorted(row)}. Rename the one that holds the prompt.")
        prompt = row[column]
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
            ids = self._encode_messages(prompt)
        else:
            raise ValueError(
                f"A prompt must be a text or a non-empty list of messages with 'role' and 'content', got {prompt!r:.200}."
            )
        if not ids:
            raise ValueError(
                f"The row {row!r:.200} has an empty prompt, and the tokenizer adds no BOS token: there is nothing to "
                "condition the first token on. Remove such rows from the dataset."
            )
        return ids

    def truncate(self, ids: list[int]) -> list[int]:
        """The last `max_length` ids."""
        return ids[-self.max_length :]

    def fits(self, row: dict[str, Any]) -> bool:
        """Whether the row's prompt needs no truncation."""
        return len(self.encode(row)) <= self.max_length

    def _encode_text(self, text: str) -> list[int]:
        # a text rendered by a chat template may already begin with the BOS token that the tokenizer would add
        bos, eos = cast(str | None, self.tokenizer.bos_token), cast(str | None, self.tokenizer.eos_token)
        add_special_tokens = not (bos and text.startswith(bos))
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        # nor may a prompt end with the EOS token that some tokenizers add
        return ids[:-1] if eos and ids[-1:] == [self.tokenizer.eos_token_id] and not text.endswith(eos) else ids

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        if not (self.chat_template or self.tokenizer.chat_template):
            raise ValueError(
                "The prompts are conversations, but the tokenizer has no chat template to render them with. Set "
                "tokenizer.chat_template and pass it as processing_class, or use plain-text prompts."
            )
        answers_next = messages[-1]["role"] != "assistant"
        ids = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=answers_next,
            continue_final_message=not answers_next,
            tokenize=True,
            return_dict=False,
            chat_template=self.chat_template,
            **self.chat_template_kwargs,
        )
        return list(cast(list[int], ids))


def check_dataset(dataset: AnyDataset, role: str) -> AnyDataset:
    """Raises ValueError if `dataset` is empty or has no 'prompt' column; `role` is how the message calls it."""
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise ValueError(
            f"{role} is a {type(dataset).__name__}; it must be a datasets.Dataset or datasets.IterableDataset. "
            "For a list of rows: datasets.Dataset.from_list(rows)."
        )
    columns = dataset.column_names  # a stream may not know its columns; then each row is checked as it comes
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{role} has no 'prompt' column; it has {columns}. Rename the one that holds the prompt.")
    if isinstance(dataset, datasets.Dataset) and len(dataset) == 0:
        raise ValueError(f"{role} is empty; there is no prompt to distil on.")
    return dataset
