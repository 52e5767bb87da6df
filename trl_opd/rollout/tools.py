"""Rollouts in which the student calls tools: turns of the student with the tools' answers between them, as one completion.

How this differs from the usual loop:
1. What was sampled is never tokenised anew: the ids of a tool's answer are appended to the sampled ids. They are the
   difference of two renderings of the chat template, with and without the answer.
2. It is an engine around an engine, so that any engine can call tools.
3. A turn's random numbers depend on its row's seed and its number only, not on how many rows still go on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import trl
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch import Completion, ToolUse
from ..config import OnPolicyDistillationConfig, as_dict
from .engine import RolloutEngine
from .func import RolloutFunc

Tool = Callable[..., Any]
"""A Python function with type hints and a Google-style docstring, from which the model is told how to call it."""
UNKNOWN, UNREADABLE = "unknown", "unreadable"
"""The name of a tool that a call does not name; where a call that could not be read says why."""


@dataclass
class _Trajectory:
    """A completion as it grows."""

    prompt: list[int]
    seed: int
    limit: int
    """Most tokens of the completion, tools' answers included."""
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    failures: int = 0
    stopped: bool = False
    answered: bool = True
    """Whether it is the student's turn."""

    @property
    def room(self) -> int:
        return self.limit - len(self.ids)

    def add_turn(self, turn: Completion) -> None:
        """What the student sampled."""
        assert len(turn.ids) <= self.room, f"the engine sampled {len(turn.ids)} tokens where {self.room} was the limit"
        self.ids += turn.ids
        self.logps += turn.logps
        self.mask += turn.actions
        self.stopped, self.answered = turn.stopped, False

    def add_answer(self, messages: list[dict[str, Any]], ids: list[int]) -> None:
        """What the tools gave back; without room for it and one more token, the trajectory ends as cut."""
        if len(ids) >= self.room:
            self.stopped = False
            return
        self.messages += messages
        self.mask += [False] * len(ids)
        self.logps += [0.0] * len(ids)
        self.ids += ids
        self.answered = True

    def completion(self) -> Completion:
        """It all, as an engine returns it."""
        use = ToolUse(self.messages, self.calls, self.failures)
        return Completion(self.ids, self.logps, self.stopped, self.mask, use)


class ToolEngine:
    """Lets the student call tools: samples a turn, runs the calls in it, and goes on after their answers.

    Args:
        engine: Samples the turns.
        template: Has the functions the student may call, reads the calls and renders their answers.
        args: The limits, `max_completion_length` (tools' answers included) and `max_tool_calling_iterations`.
        most: The greatest of the numbers that the processes pass, where they hold parts of one model and so must sample the
            same number of times. None: each process goes on alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        template: ToolTemplate,
        args: OnPolicyDistillationConfig,
        most: Callable[[int], int] | None = None,
    ) -> None:
        self.engine, self.template, self.args = engine, template, args
        self.most = most or (lambda number: number)
        self.tools = {tool.__name__: tool for tool in template.tools}

    @property
    def max_gap(self) -> float | None:
        """That of the engine."""
        return self.engine.max_gap

    @property
    def whole_softmax(self) -> bool:
        """That of the engine."""
        return self.engine.whole_softmax

    def sync(self, model: PreTrainedModel | PeftModel) -> None:
        """Passes it on to the engine."""
        self.engine.sync(model)

    def generate(
        self,
        model: PreTrainedModel | PeftModel,
        prompts: list[list[int]],
        seeds: list[int] | None = None,
        limits: list[int] | None = None,
    ) -> list[Completion]:
        """One completion of as many turns as it takes for each prompt; see `RolloutEngine`."""
        if seeds is None:
            seeds = np.random.randint(2**62, size=len(prompts)).tolist()
        limits = limits or [self.args.max_completion_length] * len(prompts)
        rows = [_Trajectory(*given) for given in zip(prompts, cast(list[int], seeds), limits, strict=True)]
        turn = 0
        while size := self.most(sum(row.answered for row in rows)):
            self._turn(model, [row for row in rows if row.answered], turn, size)
            turn += 1
        return [row.completion() for row in rows]

    def _turn(self, model: PreTrainedModel | PeftModel, rows: list[_Trajectory], turn: int, size: int) -> None:
        """Samples the next turn of `rows`, and of dummies of one token that make them `size`; runs the calls in them."""
        missing = size - len(rows)
        turns = self.engine.generate(
            model,
            [*(row.prompt + row.ids for row in rows), *[[self.template.some_id]] * missing],
            [*(turn_seed(row.seed, turn) for row in rows), *[0] * missing],
            [*(row.room for row in rows), *[1] * missing],
        )
        assert len(turns) == size, f"{len(turns)} completions for {size} prompts"
        for row, completion in zip(rows, turns[: len(rows)], strict=True):
            start = len(row.ids)
            row.add_turn(completion)
            row.messages.append(self.template.message(row.prompt + row.ids[:start], row.ids[start:], whole=row.stopped))
            if row.stopped and (self.args.max_tool_calling_iterations is None or turn < self.args.max_tool_calling_iterations):
                self._answer(row)

    def _answer(self, row: _Trajectory) -> None:
        """Runs the calls of the row's last turn, if any, and appends what they give."""
        answers = []
        for call in row.messages[-1].get("tool_calls", []):
            name, content, failed = run_call(self.tools, call)
            answers.append({"role": "tool", "name": name, "content": content})
            row.calls, row.failures = row.calls + 1, row.failures + failed
        if answers:
            row.add_answer(answers, self.template.answer_ids(answers))


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a row's turn; that of the first is the row's own, so that tools that are not called change nothing."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence((seed, turn)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def run_call(tools: dict[str, Tool], call: Any) -> tuple[str, str, bool]:
    """The name, the answer as a text, and whether it is an error; nothing that a call does wrong ends the run."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = str(function.get("name", UNKNOWN)) if isinstance(function, dict) else UNKNOWN
    try:
        if not isinstance(function, dict) or UNREADABLE in function:
            raise ValueError(function[UNREADABLE] if isinstance(function, dict) else f"{call} is no call of a function.")
        if name not in tools:
            raise ValueError(f"There is no tool {name}; there are: {', '.join(tools)}.")
        return name, str(tools[name](**(function.get("arguments") or {}))), False
    except Exception as error:  # a user's function may raise anything, and the student must see it
        return name, str({"error": str(error)}), True


class ToolTemplate:
    """Reads the student's calls from its turns and renders the tools' answers, by the tokenizer's chat template.

    Args:
        tokenizer: Has a chat template with tools and a `response_template`, or a chat template that TRL knows one for.
        tools: The functions, as the template shows them to the student.
        stop_ids: Token ids that end a turn.
        chat_template_kwargs: Extra arguments of the chat template.

    Raises:
        ValueError: If calls cannot be read or answers cannot be rendered; what is missing is in the message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        stop_ids: Sequence[int],
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.tools, self.stop_ids = tokenizer, list(tools), set(stop_ids)
        self.kwargs = {"tools": self.tools, **(chat_template_kwargs or {})}
        self.name = f"The chat template of '{tokenizer.name_or_path}'"
        self.some_id = min(stop_ids)
        _check_tools(tools)
        if not trl.supports_tool_calling(tokenizer):
            raise ValueError(
                f"{self.name} cannot show tool calls and their answers, so that tools cannot be used. Set "
                "tokenizer.chat_template to one that can, or take a model that was trained to call tools."
            )
        if getattr(tokenizer, "response_template", None) is None:  # transformers sets it only where it is saved
            self._add_response_template()
        self.answer_ids([{"role": "tool", "name": tools[0].__name__, "content": "0"}])

    def message(self, before: list[int], turn: list[int], *, whole: bool) -> dict[str, Any]:
        """The assistant's turn as a message; a turn that cannot be read has one call, whose answer says what is wrong.

        Args:
            before: Token ids the turn follows.
            turn: Token ids the student sampled.
            whole: Whether it ended with a stop token; what was cut need not make sense.
        """
        try:
            message = cast(dict[str, Any], self.tokenizer.parse_response(turn, prefix=before, tools=[*self.tools]))
        except (ValueError, TypeError, KeyError) as error:  # what transformers' parsers raise for malformed calls
            message = {"role": "assistant", "content": self.tokenizer.decode(turn, skip_special_tokens=True)}
            call = {"name": UNKNOWN, "arguments": {}, UNREADABLE: str(error)}
            return message | ({"tool_calls": [{"type": "function", "function": call}]} if whole else {})
        message["content"] = str(message.get("content") or "").removesuffix(str(self.tokenizer.eos_token))
        return message

    def answer_ids(self, answers: list[dict[str, Any]]) -> list[int]:
        """Token ids between the end of a turn with calls and the student's next: the answers and the header of that turn."""
        calls = [{"type": "function", "function": {"name": answer["name"], "arguments": {}}} for answer in answers]
        asked: list[dict[str, Any]] = [{"role": "user", "content": "."}]
        called = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        header, turn = len(self._render(asked, True)), self._render(called, False)
        ends = [place + 1 for place, token in enumerate(turn) if token in self.stop_ids and place >= header]
        whole = self._render([*called, *answers], True)
        if not ends or whole[: ends[-1]] != turn[: ends[-1]]:
            known = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
            reason = "writes an earlier turn otherwise once an answer follows" if ends else f"ends turns with none of {known}"
            raise ValueError(
                f"{self.name} {reason}, so that a tool's answer cannot be appended to what was sampled. Set "
                "tokenizer.chat_template = trl.get_training_chat_template(tokenizer) if TRL knows the model, or change it."
            )
        return whole[ends[-1] :]

    def _render(self, messages: list[dict[str, Any]], answers_next: bool) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=answers_next, tokenize=True, return_dict=False, **self.kwargs
        )
        return list(cast(list[int], ids))

    def _add_response_template(self) -> None:
        try:
            trl.add_response_schema(self.tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{self.name} is none that TRL knows, and the tokenizer has no response_template, so that the student's tool "
                "calls cannot be read. Set tokenizer.response_template (transformers' docs, 'Response parsing')."
            ) from error


def make_tool_template(
    tools: list[Tool] | None,
    rollout_func: RolloutFunc | None,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    args: OnPolicyDistillationConfig,
) -> ToolTemplate | None:
    """None where there are no tools.

    Raises:
        ValueError: If a user's own loop would have to know of them.
    """
    if not tools:
        return None
    if rollout_func is not None:
        raise ValueError(
            "tools and rollout_func are both given, but rollout_func is a loop of its own, which would have to run the calls. "
            "Leave out one of them."
        )
    return ToolTemplate(tokenizer, tools, stop_ids, as_dict(args.chat_template_kwargs))


def _check_tools(tools: Sequence[Tool]) -> None:
    names = [tool.__name__ for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"tools have the names {names}; each needs one of its own.")
    if coroutines := [tool.__name__ for tool in tools if inspect.iscoroutinefunction(tool)]:
        raise ValueError(
            f"The tools {coroutines} are async functions, which are not awaited here. Wrap each in a plain one that calls "
            "asyncio.run."
        )
