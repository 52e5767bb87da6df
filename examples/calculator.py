"""A student that seldom calls a calculator learns to, from a teacher that always does.

    python examples/calculator.py

1. A prompt asks for the product of two numbers, which models of this size cannot work out. One that calls the calculator need
   only copy what comes back: `<call>calc e=47*82</call>`, then, after the tool's `3854`, `3854`.
2. The teacher (a Llama of two layers, made here in a minute on a CPU) was trained on such conversations. The student is the
   teacher after more training on conversations of which most guess an answer without a call.
3. The student writes, calls and is answered; the teacher scores every token the student wrote, in all turns. Nobody is
   trained on the calculator's output.
"""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

SPECIAL = ["<pad>", "<eos>", "<u>", "<a>", "<t>", "<call>", "</call>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}"
    "{% for key, value in c.function.arguments.items() %}{{ ' ' ~ key ~ '=' ~ value }}{% endfor %}{{ '</call>' }}{% endfor %}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {  # how transformers reads a message, calls included, from what a model wrote
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
        "content": {"close": "<eos>", "content": "text"},
    },
}
GUESSES = 0.85
"""Share of the student's second training that answers without a call."""


def calc(e: str) -> int:
    """Multiplies two numbers.

    Args:
        e: The product, as in "47*82".

    Returns:
        Its value.
    """
    a, b = e.split("*")
    return int(a) * int(b)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each digit and sign, for the beginnings of a call, and for the roles."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, "calc", " e=", *"0123456789*"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("calc| e=|."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of two layers, with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()["<eos>"],
        pad_token_id=tokenizer.get_vocab()["<pad>"],
    )
    return LlamaForCausalLM(config)


def problem(rng: random.Random) -> str:
    """A product of four digits."""
    return f"{rng.randint(40, 99)}*{rng.randint(40, 99)}"


def conversation(text: str, rng: random.Random, guesses: float) -> list[tuple[str, bool]]:
    """A conversation in parts, each with whether it is the assistant's."""
    answer = f"{calc(text)}<eos>"
    parts = [(f"<u>{text}<eos><a>", False)]
    if rng.random() < guesses:
        parts += [(f"{rng.randint(1600, 9801)}<eos>", True)]
    else:
        parts += [(f"<call>calc e={text}</call><eos>", True), (f"<t>{answer}<a>", False), (answer, True)]
    return parts


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, guesses: float, seed: int) -> None:
    """Supervised training on conversations of which a share of `guesses` makes no call."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        conversations = [conversation(problem(rng), rng, guesses) for _ in range(128)]
        batch = tokenizer(["".join(p for p, _ in parts) for parts in conversations], return_tensors="pt", padding=True)
        own = [[mine for part, mine in parts for _ in tokenizer.tokenize(part)] for parts in conversations]
        width = batch["input_ids"].shape[1]
        own_BT = torch.tensor([row + [False] * (width - len(row)) for row in own])
        labels_BT = batch["input_ids"].where(own_BT, -100)
        model(**batch, labels=labels_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def prompts(count: int, seed: int) -> Dataset:
    """Conversations that ask for a product."""
    rng = random.Random(seed)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": problem(rng)}]} for _ in range(count)])


def solved(trainer: OnPolicyDistillationTrainer, model: Any = None) -> dict[str, float]:
    """Share of held-out problems that are solved, by a sampled conversation, and share of those with a call."""
    rows = prompts(256, seed=10**6).to_list()
    ids = [trainer.prompt_encoder.encode(row) for row in rows]
    done = trainer.engine.generate(model or trainer.student(), ids, list(range(len(ids))))
    uses = [completion.tool_use for completion in done]
    answers = [use.messages[-1]["content"] if use else "" for use in uses]
    right = [answer == str(calc(row["prompt"][0]["content"])) for row, answer in zip(rows, answers, strict=True)]
    return {"accuracy": sum(right) / len(right), "calls": sum(use.calls > 0 for use in uses if use) / len(right)}


def main(teacher_steps: int = 400, student_steps: int = 60, max_steps: int = 60) -> None:
    """Makes both models, distills, and prints what came of it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    teacher = make_model(tokenizer)
    train(teacher, tokenizer, teacher_steps, guesses=0.0, seed=0)
    student = copy.deepcopy(teacher)
    train(student, tokenizer, student_steps, guesses=GUESSES, seed=1)
    args = OnPolicyDistillationConfig(
        output_dir="calculator",
        per_device_train_batch_size=64,
        max_steps=max_steps,
        learning_rate=1e-3,
        max_completion_length=24,
        max_tool_calling_iterations=2,
        activation_checkpointing=False,
        eval_strategy="steps",
        eval_steps=max_steps,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = OnPolicyDistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=prompts(64 * max_steps, seed=2),
        processing_class=tokenizer,
        evaluators=[solved],
        tools=[calc],
    )
    print("teacher", solved(trainer, teacher))
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    for when, entry in (("before", history[0]), ("after", history[-1])):
        print(f"{when}: accuracy {entry['eval_accuracy']:.3f}, conversations with a call {entry['eval_calls']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
