"""Where the time of an optimizer step goes, by `torch.profiler`: the spans of a trace, and the operations that take longest.

    python benchmarks/step_profile.py

Work W1 of `steps.py`, after a short first step. (Not called profile.py: scripts beside a file of that name would import it in
the place of Python's own module.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from arms import Setting, ours
from heal_pruned import load_smollm2
from report import table
from torch.profiler import profile
from transformers import PrinterCallback
from works import WORKS

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.tracing import TraceCallback

SPANS = {
    "sync": 0,
    "rollout": 0,
    "prefill": 1,
    "decode": 1,
    "teacher": 0,
    "train": 0,
    "forward": 1,
    "backward": 1,
    "optimizer": 0,
}
"""In the order of a step; 1: within the one before."""


def show(done: profile, top: int) -> str:
    """Tables of one step."""
    events = {event.key: event for event in done.key_averages()}
    (whole,) = [event.cpu_time_total for name, event in events.items() if name.startswith("step ")]

    def row(name: str, spent: float, count: int) -> list[str]:
        return [name, f"{spent / 1e6:.3f}", f"{spent / whole:.1%}", str(count)]

    spans = [(name, events[name], level) for name, level in SPANS.items() if name in events]
    rest = whole - sum(event.cpu_time_total for _, event, level in spans if level == 0)
    rows = [row("- " * level + name, event.cpu_time_total, event.count) for name, event, level in spans]
    by_span = table(["span", "seconds", "of the step", "times"], [*rows, row("rest", rest, 1), row("step", whole, 1)])
    operations = [event for name, event in events.items() if name not in SPANS and not name.startswith("step ")]
    operations.sort(key=lambda event: -event.self_cpu_time_total)
    longest = [row(event.key, event.self_cpu_time_total, event.count) for event in operations[:top]]
    return f"{by_span}\n\n{table(['operation, without those it calls', 'seconds', 'of the step', 'times'], longest)}\n"


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="W1", choices=list(WORKS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--top", type=int, default=15, help="operations")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    student, tokenizer = load_smollm2()
    teacher, _ = load_smollm2()
    setting = Setting(student, teacher.eval().requires_grad_(False), tokenizer, WORKS[options.work])
    steps = {"trace_steps": [2 + n for n in range(options.steps)], "max_steps": options.steps + 1}
    trainer = ours(setting, options.steps, OnPolicyDistillationTrainer, **steps)
    trainer.remove_callback(PrinterCallback)
    (traces,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TraceCallback)]

    def tell(done: profile, path: Path) -> None:
        print(f"{path.stem}\n{show(done, options.top)}", flush=True)

    traces.write = tell
    trainer.train()  # in this thread: the profiler, first used in another one, crashed


if __name__ == "__main__":
    main()
