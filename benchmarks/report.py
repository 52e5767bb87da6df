"""What benchmarks share of their output: tables, the file of results, and where they ran."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import trl_opd

RESULTS = Path(__file__).parent / "results" / "bench.json"
PACKAGES = ("trl", "transformers", "accelerate", "peft", "torch")


def machine() -> dict[str, Any]:
    """Date, versions, processor."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"trl_opd": trl_opd.__version__, **{name: version(name) for name in PACKAGES}},
        "cpu": found[0].split(":")[1].strip() if found else "unknown",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def save(part: str, figures: Any) -> None:
    """Puts what a benchmark found, and where, under its name in the file of results; others' stay."""
    results = load()
    results[part] = {"machine": machine(), **figures}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def load(path: Path = RESULTS) -> dict[str, Any]:
    """What is in a file of results; nothing if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
