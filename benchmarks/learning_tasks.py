"""The two tasks of `learning.py`, each with a teacher, a student that is half as good, and a pool of prompts.

- `addition` is that of examples/addition.py with its models: at most five tokens an answer.
- `chain` has answers of 41 tokens, each of which needs the one before it: the running sums, modulo 10, of 40 digits. A prompt
  is `"3141…="`, its answer `"3489…"` (3, 3+1, 3+1+4, …) and the end token. After one wrong digit all later ones are wrong, if
  the model goes on adding.

`python benchmarks/learning_tasks.py` makes the models of `chain` anew, in benchmarks/results/chain/. Both are a Llama of two
layers: the teacher after `STEPS` steps of supervised training, the student a checkpoint of the same run, taken when it first
solved `STUDENT_ACCURACY` of 256 training problems.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import addition

CHAIN = Path(__file__).parent / "results" / "chain"
DIGITS = 40
STEPS, BATCH, LEARNING_RATE = 300, 64, 3e-3
STUDENT_ACCURACY = 0.4
POOL_SEED, HELDOUT_SEED = 12345, 54321


@dataclass(frozen=True)
class Task:
    """A task and how much of it a run gets.

    Args:
        name: Its name in results and tables.
        folder: Where its `student` and `teacher` are.
        make_prompts: So many prompts of training, by a seed.
        make_heldout: So many others, always the same.
        max_completion_length: In tokens, the stop token included.
        batch: Completions of an optimizer step.
        steps: Optimizer steps of a run.
        pool: Different prompts that are drawn from, again and again.
        num_heldout: Problems of an evaluation.
    """

    name: str
    folder: Path
    make_prompts: Callable[[int, int], Dataset]
    make_heldout: Callable[[int], Dataset]
    max_completion_length: int
    batch: int
    steps: int
    pool: int
    num_heldout: int

    def load(self, name: str) -> Any:
        """`student` or `teacher`."""
        return AutoModelForCausalLM.from_pretrained(self.folder / name)

    def tokenizer(self) -> Any:
        """Of both; a fresh one."""
        return AutoTokenizer.from_pretrained(self.folder / "student")

    def prompts(self) -> Dataset:
        """The pool; columns `prompt` and `answer`."""
        return self.make_prompts(self.pool, POOL_SEED)

    @cache  # noqa: B019
    def heldout(self) -> dict[str, list[str]]:
        """What is evaluated on."""
        return self.make_heldout(self.num_heldout)[:]

    @torch.no_grad()
    def write(self, model: Any, prompts: list[str], *, sample: bool) -> list[list[int]]:
        """Completions of a model, the stop token included: greedy, or of its distribution at temperature 1."""
        tokenizer = self.tokenizer()
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        drawn: dict[str, Any] = (
            {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        )
        ids_BT = model.generate(**batch, **drawn, max_new_tokens=self.max_completion_length)
        completions = []
        for ids in ids_BT[:, batch["input_ids"].shape[1] :].tolist():
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            completions.append(ids[:end])
        return completions

    def accuracy(self, model: Any) -> float:
        """Of greedy answers to the held-out problems; 0 to 1."""
        return self.score(model, self.heldout())

    def score(self, model: Any, rows: dict[str, list[str]], *, sample: bool = False) -> float:
        """The fraction of `rows` that it answers exactly."""
        texts = self.tokenizer().batch_decode(self.write(model, rows["prompt"], sample=sample), skip_special_tokens=True)
        return addition.accuracy(texts, rows["answer"])


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """Reward, in TRL's signature: 1 for the right answer, else 0; the same comparison as `Task.accuracy`."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def running_sums(digits: str) -> str:
    """The sums, modulo 10, of the first digit, the first two, and so on."""
    total, sums = 0, []
    for digit in digits:
        total = (total + int(digit)) % 10
        sums.append(str(total))
    return "".join(sums)


def chain_prompts(n: int, seed: int) -> Dataset:
    """`n` rows of `chain`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        rows.append({"prompt": f"{digits}=", "answer": running_sums(digits)})
    return Dataset.from_list(rows)


def chain_heldout(n: int) -> Dataset:
    """`n` others: of 10^40 prompts, two are not drawn twice."""
    return chain_prompts(n, HELDOUT_SEED)


def chain_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each digit and `=`; `<pad>` is 0, `<eos>` 1."""
    return addition.make_tokenizer("0123456789=")


def chain_model(tokenizer: Any) -> LlamaForCausalLM:
    """A Llama of 2 layers, width 96."""
    return addition.make_model(tokenizer, context=2 * DIGITS + 16)


TASKS = {
    task.name: task
    for task in (
        Task(
            "addition",
            addition.FOLDER,
            addition.train_prompts,
            addition.heldout,
            addition.MAX_COMPLETION_LENGTH,
            128,
            120,
            1024,
            1000,
        ),
        # three more than a right answer has, so that one that does not stop is wrong
        Task("chain", CHAIN, chain_prompts, chain_heldout, DIGITS + 4, 64, 48, 512, 320),
    )
}


def make_chain(
    folder: Path, steps: int = STEPS, student_accuracy: float = STUDENT_ACCURACY, seed: int = 0
) -> dict[str, float]:
    """Trains the teacher of `chain`, and its student on the way, and saves both.

    Returns:
        The greedy accuracy of each on held-out problems.
    """
    torch.manual_seed(seed)
    task, tokenizer = TASKS["chain"], chain_tokenizer()
    tokenizer.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "student")
    teacher, student = chain_model(tokenizer), None
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    check = chain_prompts(256, seed + 1)[:]
    batches: Any = chain_prompts(steps * BATCH, seed).iter(BATCH)
    for step, rows in enumerate(batches, start=1):
        texts = [p + a + tokenizer.eos_token for p, a in zip(rows["prompt"], rows["answer"], strict=True)]
        batch = tokenizer(texts, return_tensors="pt")
        labels_BT = batch["input_ids"].clone()
        labels_BT[:, : DIGITS + 1] = -100  # the digits are random: nothing to learn from them
        loss = teacher(**batch, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if student is None and step % 2 == 0 and loss.item() < 0.4:  # far above it, not one answer of 41 tokens is right
            score = task.score(teacher, check)
            print(f"step {step}: loss {loss.item():.3f}, accuracy {score:.3f}", flush=True)
            student = copy.deepcopy(teacher) if score >= student_accuracy else None
    if student is None:
        raise RuntimeError(f"No checkpoint reached accuracy {student_accuracy} in {steps} steps: try another seed")
    scores = {}
    for name, model in {"teacher": teacher, "student": student}.items():
        model.save_pretrained(folder / name)
        scores[name] = task.accuracy(model)
    return scores


if __name__ == "__main__":
    start = time.perf_counter()
    print(make_chain(CHAIN), f"{time.perf_counter() - start:.0f} s")
