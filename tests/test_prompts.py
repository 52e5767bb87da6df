"""From dataset rows to token ids: rendering, order, groups, and the prompt that only the teacher sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.batch import Completion, Rollout
from trl_opd.prompts import PromptEncoder
from trl_opd.teachers import ModelTeacher

from .helpers import CHARACTERS, lora, make_dataset, make_model, make_tokenizer, make_trainer

USER = {"role": "user", "content": "1+1="}
BOS, EOS = 2, 1


def ids_of(text: str) -> list[int]:
    """The ids by hand: four special tokens stand before the characters."""
    return [4 + CHARACTERS.index(character) for character in text]


def encoder(tokenizer: PreTrainedTokenizerFast | None = None, **template_kwargs: Any) -> PromptEncoder:
    """An encoder without a limit."""
    return PromptEncoder(tokenizer or make_tokenizer(chat=True), template_kwargs, 1000)


def adding_tokenizer(*, chat_template: str | None = None, eos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer that adds BOS before each text, as Llama's does, and EOS after it if asked to."""
    tokenizer = make_tokenizer(bos=True)
    special_tokens = [("<bos>", BOS), ("<eos>", EOS)]
    pattern = "<bos> $A <eos>" if eos else "<bos> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=pattern, special_tokens=special_tokens)
    tokenizer.chat_template = chat_template
    return tokenizer


class Recorded(OnPolicyDistillationTrainer):
    """Keeps the rollouts of training."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        self.rollouts: list[Rollout] = [*getattr(self, "rollouts", []), rollout]
        return rollout

    def prompts(self) -> list[Any]:
        """The prompts of all rows, in the order in which they were rolled out."""
        return [row["prompt"] for rollout in self.rollouts for row in rollout.rows]


# ---- Rendering


def test_plain_text() -> None:
    assert encoder().encode({"prompt": "12+ab"}) == [5, 6, 14, 17, 18] == ids_of("12+ab")


def test_conversation_ends_with_the_start_of_an_answer() -> None:
    assert encoder().encode({"prompt": [USER]}) == ids_of("u 1+1= a ")
    system = {"role": "system", "content": "add"}
    assert encoder().encode({"prompt": [system, USER]}) == ids_of("s add u 1+1= a ")


def test_last_message_of_the_assistant_is_continued() -> None:
    """No new turn is opened and nothing of the template is left after the words already given."""
    prompt = [USER, {"role": "assistant", "content": "it is"}]
    assert encoder().encode({"prompt": prompt}) == ids_of("u 1+1= a it is")


def test_chat_template_kwargs_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ 'y' if think else 'n' }}"
    assert encoder(tokenizer, think=True).encode({"prompt": [USER]}) == ids_of("1+1=y")
    assert encoder(tokenizer).encode({"prompt": [USER]}) == ids_of("1+1=n")
    data = datasets.Dataset.from_list([{"prompt": [USER]}] * 4)
    trainer = make_trainer(
        tmp_path, processing_class=tokenizer, train_dataset=data, chat_template_kwargs={"think": True}, cls=Recorded
    )
    rollout = trainer.generate_rollout([{"prompt": [USER]}])
    assert rollout.ids_BT[0, :5].tolist() == ids_of("1+1=y")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("1+1=", [BOS, *ids_of("1+1=")]),
        ("<bos>1+1=", [BOS, *ids_of("1+1=")]),
        ([USER], [BOS, *ids_of("1+1=a")]),
    ],
    ids=["text", "text rendered by a template", "conversation"],
)
def test_one_bos(prompt: Any, expected: list[int]) -> None:
    """The template writes BOS and the tokenizer adds one: the prompt has one."""
    tokenizer = adding_tokenizer(chat_template="<bos>{{ messages[0]['content'] }}a")
    assert encoder(tokenizer).encode({"prompt": prompt}) == expected


def test_no_bos_where_neither_writes_one() -> None:
    assert encoder(make_tokenizer(bos=True)).encode({"prompt": "1+1="}) == ids_of("1+1=")
    assert encoder(adding_tokenizer(chat_template="{{ messages[0]['content'] }}a")).encode({"prompt": [USER]}) == ids_of(
        "1+1=a"
    )


def test_eos_that_the_tokenizer_adds_does_not_end_the_prompt() -> None:
    """The student would have to continue after an end; an EOS that the text itself has stays."""
    tokenizer = adding_tokenizer(eos=True)
    assert encoder(tokenizer).encode({"prompt": "1+1="}) == [BOS, *ids_of("1+1=")]
    assert encoder(make_tokenizer()).encode({"prompt": "1<eos>"}) == [*ids_of("1"), EOS]


def test_truncation_keeps_the_end() -> None:
    short = PromptEncoder(make_tokenizer(), None, 3)
    assert short.truncate([1, 2, 3, 4, 5]) == [3, 4, 5]
    assert short.truncate([1, 2, 3]) == [1, 2, 3]
    assert short.fits({"prompt": "abc"}) and not short.fits({"prompt": "abcd"})


# ---- Order and groups


def test_training_takes_prompts_in_another_order_each_epoch(tmp_path: Path) -> None:
    def prompts(**settings: Any) -> list[list[str]]:
        trainer = make_trainer(tmp_path, cls=Recorded, train_dataset=make_dataset(8), max_steps=4, **settings)
        trainer.train()
        taken = trainer.prompts()
        return [taken[:8], taken[8:]]

    everything = sorted(make_dataset(8)["prompt"])
    first, second = prompts()
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert prompts() == [first, second]
    assert prompts(data_seed=3)[0] != first
    assert prompts(data_seed=3, seed=5) == prompts(data_seed=3)


def test_sequential_strategy_takes_prompts_as_they_stand(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, cls=Recorded, train_sampling_strategy="sequential", num_generations=2, max_steps=4)
    trainer.train()
    assert trainer.prompts() == [prompt for prompt in make_dataset(8)["prompt"] for _ in range(2)]


@pytest.mark.parametrize("streaming", [False, True])
def test_rewards_get_the_other_columns_of_their_own_rows(tmp_path: Path, streaming: bool) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def reward(prompts: list[str], answer: list[str], **_: Any) -> list[float]:
        calls.append((prompts, answer))
        return [0.0] * len(prompts)

    prompts = [f"{i}+{i}=" for i in range(8)]
    data: Any = datasets.Dataset.from_dict({"prompt": prompts, "answer": [f"for {prompt}" for prompt in prompts]})
    data = data.to_iterable_dataset() if streaming else data
    make_trainer(tmp_path, train_dataset=data, reward_funcs=reward, num_generations=2).train()
    assert len(calls) == 2
    for given, answers in calls:
        assert len(given) == 4 and given[0] == given[1] != given[2] == given[3]
        assert answers == [f"for {prompt}" for prompt in given]


# ---- The teacher's own prompt


class CountingTeacher(nn.Module):
    """Its logit for id 5 is the number of tokens it has read, every other one is 0."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        read_BT = attention_mask.cumsum(dim=1)
        logits = torch.zeros(*input_ids.shape, 8)
        logits[..., 5] = read_BT.float()
        return SimpleNamespace(logits=logits)


def test_teacher_scores_are_aligned_to_the_completion() -> None:
    """Student prompts of 4 and 2 tokens, teacher prompts of 1 and 5: log q = n - ln(e^n + 7) or -ln(e^n + 7) after n."""
    rollout = Rollout.build(
        [[1, 2, 3, 4], [6, 7]],
        [
            Completion(ids=[5, 3, 5], logps=[-1.0] * 3, stopped=False),
            Completion(ids=[3, 5], logps=[-1.0] * 2, stopped=True),
        ],
        [{"prompt": "a"}, {"prompt": "b"}],
        pad_id=0,
        device=torch.device("cpu"),
        teacher_prompts=[[7], [1, 1, 1, 1, 1]],
    )
    scores_BT = ModelTeacher(CountingTeacher(), temperature=1.0, vocab_size=8, batch_size=1).score(rollout)
    # row 0 reads 1, 2, 3 tokens before its three; row 1 reads 5, 6 before its two
    #          1 - ln(e+7) = -1.2740    0 - ln(e^2+7) = -2.6665   3 - ln(e^3+7) = -0.2990
    #                                   0 - ln(e^5+7) = -5.0461   6 - ln(e^6+7) = -0.0172
    expected = torch.tensor([[0, 0, 0, 0, -1.2740, -2.6665, -0.2990], [0, 0, -5.0461, -0.0172, 0, 0, 0]])
    torch.testing.assert_close(scores_BT, expected, atol=1e-4, rtol=0)


def logps_by_hand(model: Any, prompt: list[int], completion: list[int], vocab_size: int = 43) -> Tensor:
    """Log-probs of a completion after a prompt: one row, no padding, plain softmax."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, :, :vocab_size]
    return logits.log_softmax(dim=-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["model", "base"])
def test_privileged_prompt_reaches_the_teacher_and_not_the_student(tmp_path: Path, kind: str) -> None:
    """One teacher prompt is shorter than the student's, one longer; every score is that of its row alone."""
    rows = [{"prompt": "1234+1=", "teacher_prompt": "1="}, {"prompt": "2=", "teacher_prompt": "2= it is 4 so say 4 "}]
    settings: dict[str, Any] = {"peft_config": lora(), "teacher_model": "base"} if kind == "base" else {}
    trainer = make_trainer(tmp_path, train_dataset=datasets.Dataset.from_list(rows * 2), max_steps=1, cls=Recorded, **settings)
    rollout, teacher_logps_BT, *_ = trainer.rollout_and_scores(rows, 0, 0)
    # a fresh adapter is the identity, so that base and student are one model that reads different prompts
    teacher = make_model(1) if kind == "model" else make_model(0)
    for i, (row, completion) in enumerate(zip(rows, rollout.completion_ids(), strict=True)):
        student_prompt, teacher_prompt = ids_of(row["prompt"]), ids_of(row["teacher_prompt"])
        span = slice(len(student_prompt), len(student_prompt) + len(completion))
        assert rollout.ids_BT[i, : len(student_prompt)].tolist() == student_prompt
        torch.testing.assert_close(teacher_logps_BT[i, span], logps_by_hand(teacher, teacher_prompt, completion))
        student_logps = logps_by_hand(make_model(0), student_prompt, completion)
        torch.testing.assert_close(rollout.sampled_logps_BT[i, span], student_logps)
        assert not torch.allclose(teacher_logps_BT[i, span], logps_by_hand(teacher, student_prompt, completion), atol=1e-2)

    trainer.train()
    trained = trainer.rollouts[-1]
    prompts = [len(row["teacher_prompt"]) for row in trained.rows]
    assert trainer.state.log_history[0]["teacher_tokens"] == sum(prompts) + int(trained.completion_lengths_B.sum())


def test_teacher_prompt_may_be_a_conversation_and_is_not_truncated(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat=True)
    rows: list[dict[str, Any]] = [{"prompt": "abcdefgh", "teacher_prompt": [{"role": "user", "content": "abcdefgh"}]}] * 4
    trainer = make_trainer(
        tmp_path, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, max_prompt_length=3
    )
    rollout, teacher_logps_BT, *_ = trainer.rollout_and_scores(rows, 0, 0)
    assert rollout.teacher_prompts == (ids_of("u abcdefgh a "),) * 4
    for i, completion in enumerate(rollout.completion_ids()):
        assert rollout.ids_BT[i, :3].tolist() == ids_of("fgh")
        expected = logps_by_hand(make_model(1), ids_of("u abcdefgh a "), completion)
        torch.testing.assert_close(teacher_logps_BT[i, 3 : 3 + len(completion)], expected)


def test_the_same_teacher_prompt_changes_nothing(tmp_path: Path) -> None:
    """The two ways of scoring, with and without an own prompt, agree where the prompts do."""
    data = make_dataset(8)
    plain = make_trainer(tmp_path, train_dataset=data)
    own = make_trainer(tmp_path, train_dataset=data.add_column("teacher_prompt", data["prompt"]))
    for trainer in (plain, own):
        trainer.train()
    names = ("loss", "teacher_kl", "grad_norm", "teacher_tokens")
    for one, other in zip(plain.state.log_history[:2], own.state.log_history[:2], strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5)
