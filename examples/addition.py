"""Three-digit addition: a task, a teacher and a student small enough to distill on a laptop's CPU in a minute.

1. A prompt is `"123+456="`; the answer is the sum with its lowest digit first, `"975"`, then the end token. A token is
   one character. Answers have three or four digits, so a model must also learn when to stop.
2. The teacher is a Llama of two layers (187K parameters) after `STEPS` steps of supervised training; the student is a
   checkpoint of the very same run, taken when it first solved `STUDENT_ACCURACY` of 500 training problems.
3. One problem in twenty is held out, by a hash of its operands in either order: `train_prompts` never draws it, and
   neither model was trained on it.

`python examples/addition.py` makes both models anew, in `examples/addition/`.
"""

import copy
import random
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

FOLDER = Path(__file__).with_suffix("")
STEPS, BATCH, LEARNING_RATE = 500, 128, 5e-3
STUDENT_ACCURACY = 0.55
MAX_COMPLETION_LENGTH = 5  # four digits and the end token


def is_heldout(a: int, b: int) -> bool:
    """Whether `a + b` and `b + a` are kept for evaluation (5% of all problems, the same ones on every machine)."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 20 == 0


def _problems(n: int, seed: int, *, heldout: bool) -> Dataset:
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < n:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if is_heldout(a, b) == heldout:
            rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]})
    return Dataset.from_list(rows)


def train_prompts(n: int, seed: int) -> Dataset:
    """Draws `n` problems, with replacement, from the 95% that are for training; columns `prompt` and `answer`."""
    return _problems(n, seed, heldout=False)


def heldout(n: int) -> Dataset:
    """Returns the same `n` held-out problems on every call; columns `prompt` and `answer`."""
    return _problems(n, 0, heldout=True)


def accuracy(completions: list[str], answers: list[str]) -> float:
    """Returns the fraction, 0 to 1, of completions (without special tokens) that equal their answer."""
    return sum(c == a for c, a in zip(completions, answers, strict=True)) / len(answers)


def make_tokenizer(characters: str = "0123456789+=") -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each of the characters, `<pad>` (0) and `<eos>` (1)."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: Any, context: int = 64) -> LlamaForCausalLM:
    """Returns a randomly initialised Llama of 2 layers, width 96, 187K parameters, for at most `context` tokens."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        initializer_range=0.06,  # at the default 0.02, meant for wide models, the carry is often not found in time
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def solve(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Returns the greedy completion of each prompt, without special tokens."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    ids_BT = model.generate(**batch, do_sample=False, max_new_tokens=MAX_COMPLETION_LENGTH)
    return tokenizer.batch_decode(ids_BT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def make(folder: Path, seed: int = 0) -> dict[str, float]:
    """Trains the teacher, and the student on the way, and saves them in `folder/teacher` and `folder/student`.

    With few steps it depends on the seed whether the carry is found, the last thing learned (a jump from 10% right).

    Returns:
        The greedy accuracy of each, 0 to 1, on 2,000 held-out problems.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    teacher, student = make_model(tokenizer), None
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, STEPS // 20, STEPS)
    check = train_prompts(500, seed + 1)[:]
    batches: Any = train_prompts(STEPS * BATCH, seed).iter(BATCH)
    for step, rows in enumerate(batches):
        texts = [p + a + tokenizer.eos_token for p, a in zip(rows["prompt"], rows["answer"], strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels_BT = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
        labels_BT[:, : len(rows["prompt"][0])] = -100  # the operands are random: nothing to learn from them
        teacher(**batch, labels=labels_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if student is None and step % 10 == 0:
            score = accuracy(solve(teacher, tokenizer, check["prompt"]), check["answer"])
            student = copy.deepcopy(teacher) if score >= STUDENT_ACCURACY else None
    if student is None:
        raise RuntimeError(f"No checkpoint reached accuracy {STUDENT_ACCURACY} in {STEPS} steps: try another seed")
    test, scores = heldout(2000)[:], {}
    for name, model in {"teacher": teacher, "student": student}.items():
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)  # a fresh one: calls leave their padding side behind
        scores[name] = accuracy(solve(model, tokenizer, test["prompt"]), test["answer"])
    return scores


if __name__ == "__main__":
    start = time.perf_counter()
    print(make(FOLDER), f"{time.perf_counter() - start:.0f} s")
