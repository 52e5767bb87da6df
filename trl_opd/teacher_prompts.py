"""The prompt a teacher sees, where it is not the student's: privileged context, its own template or system message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .config import OnPolicyDistillationConfig
from .prompts import PromptEncoder

COLUMN = "teacher_prompt"


class TeacherPromptEncoder(PromptEncoder):
    """Turns a row into the token ids the teacher reads before the completion, which are never cut.

    A row's `teacher_prompt` stands in place of its `prompt`; where it is None or missing, the teacher sees the `prompt`.
    Either is rendered with `teacher_chat_template` and `teacher_system_prompt`, if these are set.

    Args:
        tokenizer: The student's: teachers read the same ids.
        args: The trainer's settings.
        template_kwargs: Extra arguments of the chat template, tools among them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, args: OnPolicyDistillationConfig, template_kwargs: dict[str, Any]
    ) -> None:
        super().__init__(tokenizer, template_kwargs, 2**31, _template(args.teacher_chat_template))
        self.system_prompt = args.teacher_system_prompt
        self.has_own = args.teacher_chat_template is not None or args.teacher_system_prompt is not None

    def encode_rows(self, rows: list[dict[str, Any]], student_prompts: list[list[int]]) -> list[list[int]] | None:
        """The teacher's prompt of each row; None if all are the student's, `student_prompts`.

        Raises:
            ValueError: If a prompt cannot be encoded; see `PromptEncoder.encode`.
        """
        lacking = [row for row in rows if COLUMN not in row]
        if 0 < len(lacking) < len(rows):
            self.encode(lacking[0], COLUMN)  # tells of it: rows of one stream that differ are rather a slip than meant
        own = [self.encode_row(row) for row in rows]
        if all(ids is None for ids in own):
            return None
        return [ids if ids is not None else theirs for ids, theirs in zip(own, student_prompts, strict=True)]

    def encode_row(self, row: dict[str, Any]) -> list[int] | None:
        """One row's; None if it is the student's."""
        if row.get(COLUMN) is not None:
            return self.encode(row, COLUMN)
        return self.encode(row) if self.has_own else None

    def _encode_text(self, text: str) -> list[int]:
        if self.has_own:
            raise ValueError(
                f"teacher_chat_template or teacher_system_prompt is set, but the prompt {text!r:.200} is plain text: no "
                "template renders it, and it has no place for a system message. Use conversational prompts (lists of "
                f"messages), or put the text that the teacher is to read into a '{COLUMN}' column and leave both out."
            )
        return super()._encode_text(text)

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.system_prompt is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.system_prompt}, *rest]
        return super()._encode_messages(messages)


def _template(setting: str | None) -> str | None:
    """The Jinja text of `teacher_chat_template`, which may name a file with it."""
    return setting if setting is None or "{" in setting else Path(setting).read_text(encoding="utf-8")
