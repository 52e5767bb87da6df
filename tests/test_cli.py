"""`trl-opd` as a user calls it: help, errors of one line, training on one process and several, Ctrl-C and going on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trl_opd
from trl_opd import cli, command_line, launcher
from trl_opd.arguments import GROUPS, LaunchArguments, Parser, TrainArguments
from trl_opd.command_line import UsageError, take_flag
from trl_opd.scripts import by_path

from .helpers import make_dataset, make_model, save_model

ROOT = Path(trl_opd.__file__).parent.parent
TRAIN = (
    *("--model_name_or_path", "student", "--teacher_model_name_or_path", "teacher", "--dataset_name", "data"),
    *("--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear", "--max_completion_length", "6"),
    *("--per_device_train_batch_size", "4", "--num_generations", "2", "--use_cpu", "--report_to", "none"),
    *("--learning_rate", "1e-2", "--lr_scheduler_type", "linear"),
)
REWARDS = """
import os, time

def slow(completions, **columns):
    with open("calls", "a") as file:
        file.write("x")
    time.sleep(0.3)
    return [0.0] * len(completions)

def fails_on_process_1(completions, **columns):
    if os.environ.get("RANK", "1") == "1":
        raise RuntimeError("this reward cannot be computed")
    return [0.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user works: student, teacher, data and reward functions."""
    save_model(tmp_path / "student", make_model(0))
    save_model(tmp_path / "teacher", make_model(1))
    make_dataset(64).to_json(tmp_path / "data/train.jsonl")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Program:
    """`trl-opd` in a process, and a session, of its own."""

    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trl_opd.cli", *words],
            env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, seconds: float = 120) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, out, err


def wait_for_calls(number: int, program: Program) -> None:
    """Waits until so many batches have been rewarded, in the middle of the last."""
    calls, start = Path("calls"), time.monotonic()
    while not calls.exists() or len(calls.read_text()) < number:
        if program.process.poll() is not None or time.monotonic() - start > 90:
            pytest.fail(f"not trained\n{program.end(1)[2][-5000:]}")
        time.sleep(0.02)


def equal(one: Path, other: Path) -> bool:
    """Whether two adapters have the same bits."""
    a, b = (load_file(path / "adapter_model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


# ---- Help


def test_help_and_what_needs_no_model_import_no_torch() -> None:
    code = "import sys, trl_opd.launcher; from trl_opd import cli; cli.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("False\n")
    assert done.stdout.startswith("usage: trl-opd <command>")


@pytest.mark.parametrize("command", ["train", "check"])
def test_help_of_a_command_has_the_most_used_first_and_all_behind_help_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    short = capsys.readouterr().out
    assert short.index("--model_name_or_path") < short.index("--learning_rate") < short.index("--seed")
    assert "--adam_beta1" not in short and ("--check_prompts" in short) == (command == "check")
    assert len(short.splitlines()) < 170
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help-all"])
    assert "--adam_beta1" in capsys.readouterr().out


def test_the_groups_of_the_help_name_options_that_exist() -> None:
    parser = Parser((LaunchArguments, TrainArguments), "trl-opd train", "")
    known = {action.dest for action in parser._actions}
    assert {name for names in GROUPS.values() for name in names} <= known


def test_report_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_opd.report.main", lambda argv: len(argv))
    assert cli.main(["report", "run", "--watch"]) == 2


# ---- Errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek"], "There is no chek command. Did you mean check?"),
        (["train", "--learnin_rate", "1"], "There is no --learnin_rate. Did you mean --learning_rate?"),
        (["train", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["train", "--temperature", "0"], "temperature is 0.0, but the policy gradient needs sampled completions"),
        (["train", "--config", "none.yaml"], "The file of --config, none.yaml, cannot be read"),
        (["train", "--config"], "--config needs the path"),
        (["train", "--accelerate_config", "fsdp3"], "no file and none of ddp, fsdp2, fsdp2_offload, multi_node, single"),
        (["train", "--accelerate_config", "single", "--num_processes", "2"], "take ddp or fsdp2 for more"),
        (["train", "--num_processes", "two"], "invalid int value: 'two'"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith(f"trl-opd {words[0]}: error: ") and err.count("\n") == 1


def test_a_key_of_the_file_that_is_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("max_step: 3\n")
    assert cli.main(["train", "--config", "run.yaml"]) == 2
    assert "There is no max_step in run.yaml. Did you mean max_steps?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--dataset_name", "nowhere/here"], "nowhere/here"),
        (["--model_name_or_path", "no-such-model"], "no-such-model"),
        (["--reward_funcs", "my_rewards.none"], "--reward_funcs has my_rewards.none, which cannot be imported"),
    ],
)
def test_what_fails_is_one_line_and_debug_shows_the_traceback(
    folder: Path, change: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *TRAIN, "--max_steps", "1", *change]
    assert cli.main(words) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-opd train: error: ")]
    assert len(lines) == 1 and said in lines[0]
    assert cli.main([*words, "--debug"]) in (1, 2)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_of_training_arguments_keeps_its_value() -> None:
    assert take_flag(["--debug", "underflow_overflow", "--x"], "--debug") == (False, ["--debug", "underflow_overflow", "--x"])
    assert take_flag(["--debug", "--x"], "--debug") == (True, ["--x"])
    assert take_flag(["--x", "1", "--debug"], "--debug") == (True, ["--x", "1"])


def test_functions_by_dotted_path(folder: Path) -> None:
    assert by_path("math.sqrt", "--tools")(4) == 2
    for path in ("sqrt", "math.none", "no_module.f", "math.pi"):
        with pytest.raises(UsageError, match=f"--tools has {path}"):
            by_path(path, "--tools")


# ---- Which processes


def test_launch_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configs = launcher.CONFIGS
    assert launcher.launch_options(["--max_steps", "3"]) == []
    assert launcher.launch_options(["--accelerate_config", "single", "--num_processes", "1"]) == []
    two = ["--config_file", str(configs / "ddp.yaml"), "--num_processes", "2"]
    assert launcher.launch_options(["--num_processes", "2"]) == two
    assert launcher.launch_options(["--num_processes=2", "--accelerate_config=ddp"]) == two
    Path("own.yaml").write_text("num_processes: 4\n")
    assert launcher.launch_options(["--accelerate_config", "own.yaml"]) == ["--config_file", "own.yaml"]
    Path("run.yaml").write_text("accelerate_config: fsdp2\nnum_processes: 4\nmax_steps: 1\n")
    four = ["--config_file", str(configs / "fsdp2.yaml"), "--num_processes", "4"]
    assert launcher.launch_options(["--config", "run.yaml"]) == four
    assert launcher.launch_options(["--config", "run.yaml", "--num_processes", "8"]) == [*four[:3], "8"]
    several = launcher.launch_options(["--accelerate_config", "multi_node", "--machine_rank", "1"])
    assert several == ["--config_file", str(configs / "multi_node.yaml"), "--machine_rank", "1"]


# ---- Commands as text


def test_the_command_that_resumes() -> None:
    argv = ["/usr/bin/trl-opd", "train", "--resume_from_checkpoint", "old", "--output_dir", "my run", "--x"]
    command = command_line.resuming(argv, "my run/checkpoint-3")
    words = ["trl-opd", "train", "--output_dir", "my run", "--x", "--resume_from_checkpoint", "my run/checkpoint-3"]
    assert shlex.split(command) == words
    assert shlex.split(command_line.resuming(["/x/trl_opd/train.py", *argv[2:]], "my run/checkpoint-3")) == words
    assert command_line.resuming(["a.py", "--resume_from_checkpoint=old"], "c") == "python a.py --resume_from_checkpoint c"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hub_token", "hf_abcdefghijk", "--seed", "1"], "--hub_token HIDDEN --seed 1"),
        (["--push_to_hub_token=abc"], "--push_to_hub_token=HIDDEN"),
        (["--wandb-api-key", "abc"], "--wandb-api-key HIDDEN"),
        (["--max_tokens_per_micro_batch", "9", "--tokens", "3"], "--max_tokens_per_micro_batch 9 --tokens 3"),
        (["--model_init_kwargs", '{"token": "abc", "a": 1}'], """--model_init_kwargs '{"token": "HIDDEN", "a": 1}'"""),
        (["--x", "hf_abcdefghijk"], "--x HIDDEN"),
        (["--output_dir", "/home/me/runs/one"], "--output_dir one"),
        (["--output_dir=~/runs/one"], "--output_dir=one"),
        (["--teacher", '{"a": "/home/me/t", "b": "Qwen/Qwen3-4B"}'], """--teacher '{"a": "t", "b": "Qwen/Qwen3-4B"}'"""),
        (["--teacher", "http://me:pw@10.0.0.7:8000/v1#name"], "--teacher 'http://…#name'"),
        (["--d", "https://huggingface.co/datasets/x", "--e", "./a/b"], "--d https://huggingface.co/datasets/x --e ./a/b"),
    ],
)
def test_a_command_as_others_may_read_it(words: list[str], expected: str) -> None:
    assert command_line.shown(["/opt/venv/bin/trl-opd", "train", *words]) == f"trl-opd train {expected}"


def test_settings_of_a_file_stand_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flags before the others, which win; what is secret there is hidden too."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "seed: 1\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\nloss_fn_config: {beta: 0.1}\nhub_token: abc\n"
        "run_name: null\nenv: {WANDB_API_KEY: abc}\n"
    )
    command = command_line.shown(["trl-opd", "train", "--seed", "2", "--config", "run.yaml", "--max_steps", "3"])
    assert command is not None
    assert shlex.split(command) == [
        *("trl-opd", "train", "--seed", "1", "--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"),
        *("--loss_fn_config", '{"beta": 0.1}', "--hub_token", "HIDDEN", "--seed", "2", "--max_steps", "3"),
    ]
    assert command_line.shown(["mine.py", "--config", "run.toml"]) == "python mine.py --config run.toml"


def test_programs_in_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.shown(["/x/trl_opd/train.py", "--a"]) == "trl-opd train --a"
    assert command_line.shown(["/x/trl_opd/cli.py", "train", "--a"]) == "trl-opd train --a"
    assert command_line.shown([str(tmp_path / "runs/mine.py"), "--a"]) == "python runs/mine.py --a"
    assert command_line.shown(["/home/me/mine.py"]) == "python mine.py"
    assert command_line.shown(["/x/ipykernel_launcher.py", "-f", "/tmp/k.json"]) is None


# ---- Training


def test_train_saves_an_adapter_with_a_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings from a file; flags win over it."""
    Path("run.yaml").write_text("max_steps: 2\nseed: 3\noutput_dir: from-file\n")
    assert cli.main(["train", *TRAIN, "--config", "run.yaml", "--output_dir", "out"]) == 0
    assert "The adapter is saved in out" in capsys.readouterr().out
    assert Path("out/adapter_model.safetensors").is_file() and not Path("from-file").exists()
    card = Path("out/README.md").read_text()
    assert "# out" in card and "| seed | `3` |" in card and "2 (step" not in card
    assert "`student` (a local folder), distilled on-policy from `teacher`" in card
    assert "![Curves of the run](curves.png)" in card
    assert Path("out/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(folder: Path, processes: int) -> None:
    """As from a terminal, the signal goes to the whole process group. What is resumed is as if uninterrupted."""
    words = ["train", *TRAIN, "--max_steps", "12", "--num_processes", str(processes), "--reward_funcs", "my_rewards.slow"]
    status, _, err = Program(*words, "--output_dir", "whole").end()
    assert status == 0, err[-5000:]
    Path("calls").unlink()

    program = Program(*words, "--output_dir", "stopped")
    wait_for_calls(3 * processes, program)
    os.killpg(program.process.pid, signal.SIGINT)
    status, out, err = program.end()
    assert status == 130, err[-5000:]
    assert "Traceback" not in err and err.count("Ctrl-C again ends at once") == 1
    (checkpoint,) = Path("stopped").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 2 <= step < 12 and not Path("stopped/adapter_model.safetensors").exists()
    assert f"Stopped after step {step} of 12" in out
    (command,) = re.findall(r"^trl-opd (.*)$", out, re.MULTILINE)
    assert command == shlex.join([*words, "--output_dir", "stopped", "--resume_from_checkpoint", str(checkpoint)])

    status, _, err = Program(*shlex.split(command)).end()
    assert status == 0, err[-5000:]
    assert equal(Path("whole"), Path("stopped"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_a_second_ctrl_c_ends_at_once(folder: Path, processes: int) -> None:
    words = ["train", *TRAIN, "--max_steps", "99", "--num_processes", str(processes), "--reward_funcs", "my_rewards.slow"]
    Path("my_rewards.py").write_text(REWARDS.replace("0.3", "30"))
    program = Program(*words, "--output_dir", "out")
    wait_for_calls(processes, program)
    os.killpg(program.process.pid, signal.SIGINT)
    time.sleep(1.5)
    second = time.monotonic()
    os.killpg(program.process.pid, signal.SIGINT)
    status, _, err = program.end()
    assert time.monotonic() - second < 10
    assert status == 130 and "Traceback" not in err and "interrupted; nothing more was saved" in err
    assert not list(Path("out").glob("checkpoint-*"))


@pytest.mark.slow
def test_sigterm_is_as_ctrl_c_with_status_143(folder: Path) -> None:
    program = Program("train", *TRAIN, "--max_steps", "99", "--reward_funcs", "my_rewards.slow", "--output_dir", "out")
    wait_for_calls(2, program)
    program.process.terminate()
    status, out, err = program.end()
    assert status == 143, err[-5000:]
    assert "This goes on from there:\ntrl-opd train" in out and len(list(Path("out").glob("checkpoint-*"))) == 1


@pytest.mark.dist
def test_of_several_processes_the_one_that_fails_is_heard_once(folder: Path) -> None:
    rewards = ("--reward_funcs", "my_rewards.fails_on_process_1")
    status, _, err = Program("train", *TRAIN, "--max_steps", "2", "--num_processes", "2", *rewards).end()
    assert status == 1
    assert "Traceback" not in err and "ChildFailedError" not in err
    said = [line for line in err.splitlines() if "error" in line.lower()]
    assert said == ["trl-opd train: error: RuntimeError: this reward cannot be computed (--debug shows where)"], err[-5000:]


@pytest.mark.dist
def test_of_several_processes_wrong_arguments_are_said_once(folder: Path) -> None:
    arguments = ("--num_processes", "2", "--temperature", "0", "--use_cpu")
    status, _, err = Program("train", *TRAIN[:6], *arguments).end()
    assert err.count("trl-opd train: error: temperature is 0.0") == 1 and "Traceback" not in err
    assert status == 2
