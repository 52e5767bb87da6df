"""How the time of a step of `sampled` grows with tokens, completions per prompt, prompt length and vocabulary.

    python benchmarks/scaling.py

Student and teacher are random Llamas of 4 layers of width 256: many tokens of them take seconds, and what does not depend on
the tokens shows. Two tables: the time per trained token from 256 to 8,192 tokens a step; and single dimensions varied one at a
time, with a formula fitted to all of them at once.
"""

from __future__ import annotations

import argparse
import gc
from statistics import median
from typing import Any

import numpy as np
import torch
from arms import Setting, make_arm
from report import save, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from works import Work

VOCAB = 32_768
TERMS = (
    "a step",
    "a trained token",
    "a prompt token of each completion",
    "a prompt token of each group",
    "a token x 1,000 of V",
)


def words(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many words."""
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="t0", eos_token="t1")


def texts(lengths: tuple[int, ...], tokenizer: Any) -> list[str]:
    """Random words."""
    random = np.random.default_rng(0)
    return [" ".join(f"t{i}" for i in random.integers(3, len(tokenizer), length)) for length in lengths]


def model(seed: int, vocab: int) -> Any:
    """A random Llama."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, eos_token_id=1, pad_token_id=0, **sizes)).eval()


def seconds(work: Work, vocab: int, steps: int, **settings: Any) -> float:
    """Median seconds of a step."""
    setting = Setting(model(0, vocab), model(1, vocab).requires_grad_(False), words(vocab), work, texts)
    arm = make_arm("sampled", setting, steps, **settings)
    arm.step()
    found = median(arm.step().seconds for _ in range(steps))
    arm.close()
    gc.collect()
    return found


def work(rows: int, group: int, prompt: int, length: int, micro_batch: int) -> Work:
    """`rows` completions of equal lengths."""
    groups = rows // group
    return Work(f"{rows} rows", (prompt,) * groups, (length,) * groups, group, micro_batch)


def flatness(steps: int) -> list[dict[str, Any]]:
    """Steps of 256 to 8,192 tokens, made of the same micro-batches; sampled as many at once, or all of a step at once."""
    found = []
    for tokens in (256, 1024, 4096, 8192):
        step = work(tokens // 64, 4, 32, 64, 4)
        held = seconds(step, VOCAB, steps, per_device_rollout_batch_size=4)
        found.append({"tokens": tokens, "4 at once": held / tokens, "all at once": seconds(step, VOCAB, steps) / tokens})
    return found


def growth(steps: int) -> list[dict[str, Any]]:
    """Points that differ from one in the middle in a single dimension."""
    middle = {"rows": 16, "group": 4, "prompt": 128, "vocab": VOCAB}
    varied = {"rows": (8, 32, 64), "group": (1, 2, 8), "prompt": (32, 256, 512), "vocab": (2 * VOCAB, 4 * VOCAB)}
    points = [middle, *(middle | {name: value} for name, values in varied.items() for value in values)]
    return [
        {**point, "tokens": point["rows"] * 32, "seconds": seconds(_work(point), point["vocab"], steps)} for point in points
    ]


def _work(point: dict[str, int]) -> Work:
    return work(point["rows"], point["group"], point["prompt"], 32, min(point["rows"], 16))


def fitted(points: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Milliseconds of each of `TERMS`, none below 0, by least squares of relative errors; and what they make of each point."""
    design = np.array(
        [
            [
                1,
                p["tokens"],
                p["rows"] * p["prompt"],
                p["rows"] // p["group"] * p["prompt"],
                p["tokens"] * p["vocab"] / 1000,
            ]
            for p in points
        ]
    )
    measured = np.array([1000 * point["seconds"] for point in points])
    used, factors = list(range(len(TERMS))), np.zeros(len(TERMS))
    while True:  # what would be negative is left out
        solved = np.linalg.lstsq(design[:, used] / measured[:, None], np.ones(len(points)), rcond=None)[0]
        if (solved >= 0).all():
            factors[used] = solved
            return factors.tolist(), (design @ factors / 1000).tolist()
        used.pop(int(solved.argmin()))


def show(found: dict[str, Any]) -> str:
    """Both tables and the formula."""
    flat = table(
        ["tokens a step", "ms a token, 4 rows sampled at once", "ms a token, all rows at once"],
        [[f"{p['tokens']:,}", f"{1000 * p['4 at once']:.2f}", f"{1000 * p['all at once']:.2f}"] for p in found["flat"]],
    )
    factors, made = fitted(found["growth"])
    rows = [
        [*(f"{point[name]:,}" for name in ("rows", "group", "prompt", "vocab")), f"{point['seconds']:.3f}", f"{formula:.3f}"]
        for point, formula in zip(found["growth"], made, strict=True)
    ]
    grown = table(["completions of 32 tokens", "G", "prompt tokens", "V", "seconds", "formula"], rows)
    told = "; ".join(f"{factor:.4g} ms {term}" for factor, term in zip(factors, TERMS, strict=True))
    return f"{flat}\n\n{grown}\n\nFormula: the sum of {told}."


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="that are counted at each point")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {"flat": flatness(options.steps), "growth": growth(options.steps)}
    print(show(found))
    if not options.dry:
        save("scaling", found)


if __name__ == "__main__":
    main()
