"""The examples, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    """Runs an example in `folder`; returns what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def figure(pattern: str, output: str) -> float:
    """The number that stands where the pattern has its group."""
    found = re.search(pattern, output)
    assert found, f"{pattern} is not in:\n{output}"
    return float(found[1])


@pytest.mark.slow
def test_the_demo_learns_and_leaves_an_adapter_and_curves(tmp_path: Path) -> None:
    output = run("distill.py", "--seed", "0", "--output_dir", "student", folder=tmp_path)
    assert figure(r"gap recovery (\S+)", output) >= 0.85
    assert figure(r"KL fell (\S+)-fold", output) >= 5
    assert (tmp_path / "student/adapter_model.safetensors").is_file()
    assert not (tmp_path / "student/model.safetensors").exists()
    assert (tmp_path / "student/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_the_teachers_signal_the_demo_gains_nothing(tmp_path: Path) -> None:
    output = run("distill.py", "--kl_penalty_coef", "0", "--max_steps", "40", folder=tmp_path)
    assert abs(figure(r"gap recovery (\S+)", output)) < 0.05


@pytest.mark.slow
def test_distill_takes_a_model_and_a_dataset_by_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = "\n".join(f'{{"prompt": "{100 + i}+{200 + i}="}}' for i in range(16))
        (tmp_path / f"data/{split}.jsonl").write_text(rows)
    run(
        "distill.py",
        *("--model_name_or_path", str(EXAMPLES / "addition/student"), "--dataset_name", str(tmp_path / "data")),
        *("--teacher_model_name_or_path", str(EXAMPLES / "addition/teacher"), "--max_completion_length", "5"),
        *("--max_steps", "1", "--report_to", "none", "--output_dir", "full", "--eval_strategy", "steps"),
        folder=tmp_path,
    )
    assert (tmp_path / "full/model.safetensors").is_file()


@pytest.mark.slow
def test_heal_pruned_runs_on_a_real_model(tmp_path: Path) -> None:
    output = run("heal_pruned.py", "--max_steps", "3", "--eval_prompts", "8", folder=tmp_path)
    assert figure(r"\((\S+) of the start\)", output) < 1
    assert (tmp_path / "healed-smollm2/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_minimal_loop_learns(tmp_path: Path) -> None:
    output = run("minimal_loop.py", folder=tmp_path)
    kls = [float(kl) for kl in re.findall(r"KL (\S+)", output)]
    assert len(kls) > 1
    assert kls[-1] < kls[0]


@pytest.mark.slow
def test_a_student_learns_to_call_a_calculator(tmp_path: Path) -> None:
    output = run("calculator.py", "400", "60", "30", folder=tmp_path)
    assert figure(r"before: accuracy (\S+),", output) < 0.4
    assert figure(r"after: accuracy (\S+),", output) > 0.85
    assert figure(r"after: .* with a call (\S+)", output) > 0.95
