"""What each of two processes holds under FSDP2, against one process alone: `benchmarks/memory.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .processes import ENVIRONMENTS

ROOT = Path(__file__).parent.parent
# glibc would keep most of what FSDP frees between layers; these make it give memory back at once, in both arms
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
HELD = ("student", "teacher", "gradients", "optimizer")


def measure(folder: Path, kind: str, processes: int) -> list[dict[str, Any]]:
    """What each process of a launch prints."""
    script = [str(ROOT / "benchmarks" / "memory.py"), kind, "--models", str(folder)]
    environment = {**os.environ, **GIVE_BACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable]
    if processes > 1:
        environment |= ENVIRONMENTS["fsdp2"] | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += [str(ROOT / "tests" / "fsdp_on_cpu.py")]
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    decoder = json.JSONDecoder()  # two processes may print on one line
    return [decoder.raw_decode(done.stdout, i)[0] for i in range(len(done.stdout)) if done.stdout.startswith('{"kind"', i)]


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_hold_half_and_need_little_more(tmp_path: Path) -> None:
    """Full fine-tuning, student and teacher of 230 MB each: tensors at most 0.55 x, peak memory at most 0.7 x."""
    assert measure(tmp_path, "models", 1) == []
    (one,) = measure(tmp_path, "full", 1)
    both = measure(tmp_path, "full", 2)
    assert one["student"] > 200e6 and one["teacher"] > 200e6 and len(both) == 2
    for process in both:
        assert process["wrapped"].startswith("FSDP")
        assert sum(process[name] for name in HELD) <= 0.55 * sum(one[name] for name in HELD)
        assert process["peak_rss_above_imports"] <= 0.7 * one["peak_rss_above_imports"], (one, process)


@pytest.mark.dist
@pytest.mark.slow
def test_base_as_teacher_costs_no_second_model(tmp_path: Path) -> None:
    """By formula: half of the base, and 16 bytes for each parameter of the adapter, half of them here."""
    assert measure(tmp_path, "models", 1) == []
    both = measure(tmp_path, "base", 2)
    for process in both:
        adapter = process["gradients"]
        assert process["teacher"] == 0 and process["optimizer"] == pytest.approx(2 * adapter, rel=0.01)
        assert sum(process[name] for name in HELD) == pytest.approx(230.7e6 / 2 + 4 * adapter, rel=0.05)
