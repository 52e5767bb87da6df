"""Memory and time of the log-probs of N tokens and their gradients: whole logits, TRL's chunks, ours; one table.

    python benchmarks/heads.py

One loss and its backward pass over a linear head of 151,936 rows on hidden states of 1,024, with entropies for the
metrics, for a frozen head (LoRA) and a trained one.

Memory: peak above what is there before, each arm in a process of its own; the gradient of a trained head's weights, which any
way of computing it needs, is part of it. Whole logits of so many tokens would fill most machines: theirs is eight times that
of an eighth of the tokens. Time: the arms alternate in one process; medians, and the ratio to whole logits within a round.
`--save` puts the figures into benchmarks/results/bench.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import save, table
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from trl_opd.heads import score_linear, score_logits
from trl_opd.linear_head import Policy

HIDDEN, VOCAB = 1024, 151_936
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Arm = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden_NH: Tensor, ids_N: Tensor, weight_VH: Tensor) -> Tensor:
    """Log-probs from all logits, as `model(...).logits` would give them."""
    return score_logits(torch.nn.functional.linear(hidden_NH, weight_VH), ids_N, Policy(), entropy=True)[0]


def chunked(hidden_NH: Tensor, ids_N: Tensor, weight_VH: Tensor) -> Tensor:
    """Ours."""
    return score_linear(hidden_NH, ids_N, weight_VH, None, Policy(), entropy=True)[0]


def trl(hidden_NH: Tensor, ids_N: Tensor, weight_VH: Tensor) -> Tensor:
    """TRL's, at the chunk size its trainers use."""
    return ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, ids_N, 1.0, 8192, None, 1.0, ("entropy",))[0]


ARMS: dict[str, Arm] = {"whole logits": whole, "TRL": trl, "trl_opd": chunked}


def inputs(num_tokens: int, trained: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids, weight."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(num_tokens, HIDDEN, device=DEVICE, dtype=dtype).requires_grad_()
    weight_VH = (torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=dtype) / HIDDEN**0.5).requires_grad_(trained)
    return hidden_NH, torch.randint(VOCAB, (num_tokens,), device=DEVICE), weight_VH


def step(arm: str, hidden_NH: Tensor, ids_N: Tensor, weight_VH: Tensor) -> float:
    """Seconds of one loss and its backward pass."""
    hidden_NH.grad = weight_VH.grad = None
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    ARMS[arm](hidden_NH, ids_N, weight_VH).exp().mean().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def resident(name: str) -> int:
    """Bytes of this process's memory: VmRSS (now) or VmHWM (the most so far)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def peak(arm: str, num_tokens: int, trained: bool, dtype: torch.dtype) -> int:
    """Bytes above what is there before the loss."""
    tensors = inputs(num_tokens, trained, dtype)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(arm, *tensors)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = resident("VmRSS")
    step(arm, *tensors)
    return resident("VmHWM") - before


def total_peak(arm: str, head: str, options: argparse.Namespace) -> float:
    """`peak` in another process; of whole logits, eight times that of an eighth."""
    parts = 8 if arm == "whole logits" else 1
    command = [sys.executable, __file__, "--peak_of", arm, head, "--dtype", options.dtype]
    command += ["--memory_tokens", str(options.memory_tokens // parts)]
    found = int(subprocess.check_output(command, timeout=900))
    gradient = HIDDEN * VOCAB * getattr(torch, options.dtype).itemsize if head == "trained" else 0
    return (found - gradient) * parts + gradient


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="for the times")
    parser.add_argument("--memory_tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--skip_memory", action="store_true")
    parser.add_argument("--save", action="store_true", help="write the results")
    parser.add_argument("--peak_of", nargs=2, metavar=("ARM", "HEAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.peak_of:
        arm, head = options.peak_of
        print(peak(arm, options.memory_tokens, head == "trained", dtype))
        return
    print(f"{DEVICE}, {options.dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    found = []
    for head in ("frozen", "trained"):
        tensors = inputs(options.tokens, head == "trained", dtype)
        rounds = [{arm: step(arm, *tensors) for arm in ARMS} for _ in range(options.rounds + 1)][1:]
        del tensors
        for arm in ARMS:
            ratio = median(times[arm] / times["whole logits"] for times in rounds)
            memory = None if options.skip_memory else total_peak(arm, head, options) / 2**30
            seconds = [round(times[arm], 4) for times in rounds]
            found.append({"head": head, "arm": arm, "peak_gib": memory, "seconds": seconds, "ratio": ratio})
    figures = {"tokens": options.tokens, "memory_tokens": options.memory_tokens, "dtype": options.dtype, "arms": found}
    print(show(figures))
    if options.save:
        save("heads", figures)


def show(found: dict[str, Any]) -> str:
    """The table."""
    head = ["head", "arm", f"peak, GiB ({found['memory_tokens']} tokens)", f"seconds ({found['tokens']} tokens)", "x whole"]
    rows = [
        [
            own["head"],
            own["arm"],
            "" if own["peak_gib"] is None else f"{own['peak_gib']:.2f}",
            f"{median(own['seconds']):.3f}",
            f"{own['ratio']:.2f}",
        ]
        for own in found["arms"]
    ]
    return table(head, rows)


if __name__ == "__main__":
    main()
