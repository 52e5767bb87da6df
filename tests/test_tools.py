"""Completions of several turns with tools between them: which tokens they hold, and which of them are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import datasets
import pytest
import torch
from transformers import PreTrainedModel

from trl_opd import Completion, OnPolicyDistillationTrainer, Rollout
from trl_opd.rollout import ToolEngine, ToolTemplate
from trl_opd.rollout.tools import run_call, turn_seed

from .helpers import make_config, make_model, make_trainer, weights
from .tool_chat import Scripted, double, make_tool_tokenizer

TOKENIZER = make_tool_tokenizer()
MODEL = cast(PreTrainedModel, None)  # no engine here looks at it
PROMPT = "<u>hi<eos> <a>"


def ids(text: str) -> list[int]:
    """Token ids."""
    return TOKENIZER(text)["input_ids"]


def broken(x: int) -> int:
    """Fails.

    Args:
        x: Anything.
    """
    raise RuntimeError("no power")


def rolled_out(tmp_path: Path, *turns: list[str], limits: int = 60, rows: int = 1, **settings: Any) -> list[Completion]:
    """Completions of a scripted student."""
    template = ToolTemplate(TOKENIZER, [double, broken], [1])
    engine = ToolEngine(Scripted(TOKENIZER, *turns), template, make_config(tmp_path, max_completion_length=limits, **settings))
    return engine.generate(MODEL, [ids(PROMPT)] * rows, list(range(rows)))


def test_a_tools_answer_stands_between_the_turns_and_is_no_action(tmp_path: Path) -> None:
    (completion,) = rolled_out(tmp_path, ["<call>double x=3</call><eos>"], ["so 6<eos>"])
    called, answer, said = ids("<call>double x=3</call><eos>"), ids(" <t>6 <a>"), ids("so 6<eos>")
    assert completion.ids == called + answer + said
    assert completion.mask == [True] * len(called) + [False] * len(answer) + [True] * len(said)
    by_turn = [[-1.0 - t for t in range(len(turn))] for turn in (called, said)]
    assert completion.logps == by_turn[0] + [0.0] * len(answer) + by_turn[1]
    assert completion.stopped
    assert completion.tool_use is not None
    assert [m["role"] for m in completion.tool_use.messages] == ["assistant", "tool", "assistant"]
    assert completion.tool_use.messages[0]["tool_calls"][0]["function"] == {"name": "double", "arguments": {"x": 3}}
    assert completion.tool_use.messages[1] == {"role": "tool", "name": "double", "content": "6"}
    assert (completion.tool_use.calls, completion.tool_use.failures) == (1, 0)


def test_the_ids_are_those_of_the_whole_conversation_rendered_at_once(tmp_path: Path) -> None:
    """The same number by another route: what the student sampled is what the template writes, so all of it must be."""
    (completion,) = rolled_out(tmp_path, ["<call>double x=3</call><eos>"], ["<call>double x=6</call><eos>"], ["12<eos>"])
    assert completion.tool_use is not None
    conversation = [{"role": "user", "content": "hi"}, *completion.tool_use.messages]
    rendered = TOKENIZER.apply_chat_template(conversation, tokenize=False)
    assert f"{TOKENIZER.decode(ids(PROMPT) + completion.ids)} " == rendered


def test_what_was_sampled_is_not_tokenised_anew(tmp_path: Path) -> None:
    """The student may sample a token where its text, read again, gives two."""
    called = [*ids("<call>double x="), TOKENIZER.get_vocab()["42"], *ids("</call><eos>")]
    assert ids(cast(str, TOKENIZER.decode(called))) != called

    class Unusual(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
            turns = super().generate(*args, **kwargs)
            return [Completion(called, [-1.0] * len(called), True)] if len(self.asked) == 1 else turns

    engine = Unusual(TOKENIZER, ["x<eos>"], ["ok<eos>"])
    tools = ToolEngine(engine, ToolTemplate(TOKENIZER, [double], [1]), make_config(tmp_path, max_completion_length=60))
    (completion,) = tools.generate(MODEL, [ids(PROMPT)], [0])
    assert completion.ids == called + ids(" <t>84 <a>ok<eos>")
    assert engine.asked[1][0] == [ids(PROMPT) + called + ids(" <t>84 <a>")]


def test_only_rows_with_calls_go_on(tmp_path: Path) -> None:
    engine = Scripted(TOKENIZER, ["a<eos>", "<call>double x=1</call><eos>", "b"], ["c<eos>"])
    tools = ToolEngine(engine, ToolTemplate(TOKENIZER, [double], [1]), make_config(tmp_path, max_completion_length=60))
    completions = tools.generate(MODEL, [ids(PROMPT)] * 3, [5, 6, 7])
    assert [TOKENIZER.decode(c.ids) for c in completions] == ["a<eos>", "<call>double x=1</call><eos> <t>2 <a>c<eos>", "b"]
    assert [c.stopped for c in completions] == [True, True, False]
    assert engine.asked[0][1:] == ([5, 6, 7], [60, 60, 60])
    assert engine.asked[1][1:] == ([turn_seed(6, 1)], [60 - len(ids("<call>double x=1</call><eos> <t>2 <a>"))])


@pytest.mark.parametrize(("limit", "goes_on"), [(24, False), (25, True)])
def test_no_tool_output_without_room_for_a_token_after_it(tmp_path: Path, limit: int, goes_on: bool) -> None:
    """24 stands for the length of call and answer: one more token must fit."""
    called = "<call>double x=10000</call><eos>"
    answer = " <t>20000 <a>"
    room = limit - 24 + len(ids(called)) + len(ids(answer))
    (completion,) = rolled_out(tmp_path, [called], ["yes<eos>"], limits=room)
    assert completion.ids == (ids(called) + ids(answer) + ids("y") if goes_on else ids(called))
    assert completion.mask is not None
    assert completion.mask[-1]
    assert not completion.stopped
    assert completion.tool_use is not None
    assert [m["role"] for m in completion.tool_use.messages] == (
        ["assistant", "tool", "assistant"] if goes_on else ["assistant"]
    )


def test_a_turn_that_was_cut_calls_nothing(tmp_path: Path) -> None:
    (completion,) = rolled_out(tmp_path, ["<call>double x=3</call>"])
    assert completion.tool_use is not None
    assert completion.tool_use.calls == 0
    assert not completion.stopped


def test_the_number_of_answers_is_limited(tmp_path: Path) -> None:
    turns = [["<call>double x=1</call><eos>"]] * 2
    (completion,) = rolled_out(tmp_path, *turns, max_tool_calling_iterations=1)
    assert completion.tool_use is not None
    assert completion.tool_use.calls == 1
    assert completion.stopped
    assert completion.ids[-1] == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("<call>broken x=1</call><eos>", "no power"),
        ("<call>halve x=1</call><eos>", "no tool halve"),
        ("<call>double y=1</call><eos>", "unexpected keyword"),
        ("<call>double x=abc</call><eos>", "invalid literal"),
    ],
)
def test_an_error_is_told_to_the_student(tmp_path: Path, call: str, words: str) -> None:
    (completion,) = rolled_out(tmp_path, [call], ["oh<eos>"], limits=300)
    assert completion.tool_use is not None
    assert words in completion.tool_use.messages[1]["content"]
    assert (completion.tool_use.calls, completion.tool_use.failures) == (1, 1)
    assert completion.stopped


@pytest.mark.parametrize("call", ["text", None, {"function": "text"}, {"name": "double", "arguments": "x=1"}])
def test_calls_of_any_shape_are_answered(call: Any) -> None:
    assert run_call({"double": double}, call)[2]


def test_arguments_that_do_not_parse_are_told_to_the_student(tmp_path: Path) -> None:
    tokenizer = make_tool_tokenizer()
    calls = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    tokenizer.response_template = {**tokenizer.response_template, "fields": {"tool_calls": calls}}
    message = ToolTemplate(tokenizer, [double], [1]).message(ids(PROMPT), ids("<call>{x</call><eos>"), whole=True)
    name, content, failed = run_call({"double": double}, message["tool_calls"][0])
    assert (name, failed) == ("unknown", True)
    assert "JSON" in content


def test_a_turns_randomness_is_that_of_its_row_and_number() -> None:
    assert turn_seed(7, 0) == 7
    assert len({turn_seed(seed, turn) for seed in range(20) for turn in range(1, 5)}) == 80


# ---- What cannot work


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + str(tokenizer.chat_template)
    with pytest.raises(ValueError, match="writes an earlier turn otherwise once an answer follows"):
        ToolTemplate(tokenizer, [double], [1])


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ends turns with none of \['<unk>'\]"):
        ToolTemplate(make_tool_tokenizer(), [double], [7])


def test_a_template_without_tools_is_refused() -> None:
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    with pytest.raises(ValueError, match="cannot show tool calls"):
        ToolTemplate(tokenizer, [double], [1])


def test_calls_that_cannot_be_read_are_refused() -> None:
    tokenizer = make_tool_tokenizer()
    del tokenizer.response_template
    with pytest.raises(ValueError, match="none that TRL knows"):
        ToolTemplate(tokenizer, [double], [1])


def test_async_tools_are_refused() -> None:
    async def wait(x: int) -> int:
        """Waits.

        Args:
            x: How long.
        """
        return x

    with pytest.raises(ValueError, match=r"\['wait'\] are async"):
        ToolTemplate(make_tool_tokenizer(), [wait], [1])


def test_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one of its own"):
        ToolTemplate(make_tool_tokenizer(), [double, double], [1])


# ---- In a run


class ScriptedTrainer(OnPolicyDistillationTrainer):
    """Every second completion calls the tool."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        first = [f"<call>double x={i}</call><eos>" if i % 2 else f"{i}<eos>" for i in range(len(rows))]
        assert isinstance(self.engine, ToolEngine)
        self.engine.engine = Scripted(TOKENIZER, first, ["so<eos>"] * (len(rows) // 2))
        rollout = super().generate_rollout(rows)
        logps_BT = torch.where(rollout.mask_BT, self.student_logps(rollout), 0.0)
        return rollout.with_sampled_logps(logps_BT)


def tool_trainer(tmp_path: Path, cls: Any = ScriptedTrainer, **more: Any) -> Any:
    """Tiny models that talk in the template of the tests."""
    prompts = [[{"role": "user", "content": f"{i} ?"}] for i in range(8)]
    defaults = {
        "model": make_model(0, vocab_size=61),
        "teacher_model": make_model(1, vocab_size=61),
        "processing_class": make_tool_tokenizer(),
        "train_dataset": datasets.Dataset.from_dict({"prompt": prompts}),
        "tools": [double],
        "max_completion_length": 60,
        "max_steps": 1,
    }
    return make_trainer(tmp_path, cls=cls, **{**defaults, **more})


def test_figures_of_calls(tmp_path: Path) -> None:
    trainer = tool_trainer(tmp_path)
    trainer.train()
    figures = trainer.state.log_history[0]
    assert figures["tools/call_frequency"] == 0.5
    assert figures["tools/calling_fraction"] == 0.5
    assert figures["tools/failure_frequency"] == 0.0
    assert figures["sampler_kl/v2"] < 1e-10
    calls = [len(ids(f"<call>double x={i}</call><eos>so<eos>" if i % 2 else f"{i}<eos>")) for i in range(4)]
    assert figures["tokens"] == sum(calls)


def test_rewards_get_all_turns(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    tool_trainer(tmp_path, reward_funcs=reward, num_generations=2).train()
    assert [[m["role"] for m in c] for c in seen[:2]] == [["assistant"], ["assistant", "tool", "assistant"]]
    assert seen[1][1]["content"] == "2"


def test_the_student_is_told_of_the_tools(tmp_path: Path) -> None:
    trainer = tool_trainer(tmp_path)
    prompt = trainer.prompt_encoder.encode({"prompt": [{"role": "user", "content": "3 ?"}]})
    assert TOKENIZER.decode(prompt) == "double;<u>3 ?<eos> <a>"


def test_a_teacher_with_a_template_of_its_own_is_told_of_them_too(tmp_path: Path) -> None:
    trainer = tool_trainer(tmp_path, teacher_chat_template="{% for tool in tools %}{{ tool.function.name }}{% endfor %}?<a>")
    prompt = trainer.teacher_prompts.encode_row({"prompt": [{"role": "user", "content": "3 ?"}]})
    assert TOKENIZER.decode(prompt) == "double?<a>"


def test_tools_need_conversations(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["3 ?"] * 8})
    with pytest.raises(ValueError, match="Make it a conversation"):
        tool_trainer(tmp_path, train_dataset=data).train()


def test_tools_and_a_loop_of_ones_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tools and rollout_func are both given"):
        tool_trainer(tmp_path, rollout_func=lambda prompts, trainer: {})


def test_tools_that_are_never_called_change_nothing(tmp_path: Path) -> None:
    """Random weights call nothing in 6 tokens; the prompt is the same where the template does not show tools."""
    tokenizer = make_tool_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("tool.function.name + ';'", "''")
    more = {"processing_class": tokenizer, "max_completion_length": 6, "max_steps": 2}
    with_tools = tool_trainer(tmp_path, OnPolicyDistillationTrainer, **more)
    without = tool_trainer(tmp_path, OnPolicyDistillationTrainer, **more, tools=None)
    for trainer in (with_tools, without):
        trainer.train()
    assert with_tools.state.log_history[0]["tools/call_frequency"] == 0
    assert "tools/call_frequency" not in without.state.log_history[0]
    theirs = weights(without.model)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(with_tools.model).items())


def test_tool_tokens_are_not_trained_on(tmp_path: Path) -> None:
    """The gradient is that of the sampled tokens alone, worked out token by token."""
    trainer = tool_trainer(tmp_path, learning_rate=0.0)
    rows = trainer.train_dataset.select(range(4)).to_list()
    batch = trainer.scored_batch(rows)
    trainer.compute_loss(trainer.model, batch).backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    total, count = torch.zeros(()), 0
    for i, text in enumerate(["0<eos>", "<call>double x=1</call><eos>", "2<eos>", "<call>double x=3</call><eos>"]):
        prompt = f"double;<u>{i} ?<eos> <a>"
        turns = [(prompt, text)] + ([(f"{prompt}{text} <t>{2 * i} <a>", "so<eos>")] if i % 2 else [])
        for before, said in turns:
            sequence = torch.tensor([ids(before) + ids(said)])
            student = trainer.model(sequence).logits[0].log_softmax(-1)
            teacher = trainer.teacher.model(sequence).logits[0].log_softmax(-1)
            for t in range(len(ids(before)), sequence.shape[1]):
                token = sequence[0, t]
                logp = student[t - 1, token]
                total = total - logp * (teacher[t - 1, token] - logp).detach()
                count += 1
    (total / count).backward()
    assert all(torch.allclose(p.grad, found[name], atol=1e-5) for name, p in trainer.model.named_parameters())
