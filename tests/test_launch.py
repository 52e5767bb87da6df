"""The trainer under `accelerate launch` with the configurations in trl_opd/accelerate_configs, on the CPU.

GPUs are what the configurations are for, so that each launch overrides what a CPU cannot do, and no more:
- `--num_processes 2` in place of 8 or 16 (4 for two machines);
- DDP: the trainer's `use_cpu`, which makes it real DDP over gloo. Without it accelerate looks for GPUs, finds none, and
  every process would train alone;
- FSDP: `fsdp_on_cpu.py` runs the script, and CPU offload does without pinned memory. FSDP itself is the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .helpers import make_model, save_model, weights
from .launch_script import ERROR

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "trl_opd/accelerate_configs"
SCRIPT, FSDP_ON_CPU = ROOT / "tests/launch_script.py", ROOT / "tests/fsdp_on_cpu.py"
SECONDS = 120
"""What a launch may take before it counts as hanging."""
TWO = ("--num_processes", "2")
FSDP1 = ("--fsdp_version", "1", "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false")
HANDLED = {"compute_environment", "distributed_type", "mixed_precision"}
"""Keys whose values `accelerate launch` takes from the file by code of their own."""


@dataclass(frozen=True)
class Ended:
    """What a launch left behind."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def result(self) -> dict[str, Any]:
        """What the main process of `launch_script.py` printed; there must be one."""
        found = re.findall(r"^RESULT (.*)$", self.stdout, re.MULTILINE)
        assert len(found) == 1, f"{len(found)} main processes\n{self.stdout[-2000:]}\n{self.stderr[-5000:]}"
        return json.loads(found[0])


class Launch:
    """An `accelerate launch` that runs.

    Args:
        config: Name of a file in trl_opd/accelerate_configs.
        log: Its output goes to files of this name, with `.out` and `.err` added.
        script: What is launched, and its arguments.
        overrides: Options of `accelerate launch` that replace what the file says.
    """

    def __init__(self, config: str, log: Path, script: list[str], overrides: tuple[str, ...] = ()) -> None:
        program = Path(sys.executable).with_name("accelerate")
        shim = [str(FSDP_ON_CPU)] if "fsdp_config" in (CONFIGS / config).read_text() else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.start, self.log = time.monotonic(), log
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(
                [str(program), "launch", "--config_file", str(CONFIGS / config), *overrides, *shim, *script],
                env=environment,
                stdout=out,
                stderr=err,
                cwd=log.parent,
                start_new_session=True,
            )

    def end(self, seconds: float = SECONDS) -> Ended:
        """Waits for it; after `seconds` it is killed, which fails the test."""
        try:
            self.process.wait(seconds)
        finally:
            self.kill()
        out, err = (self.log.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        return Ended(self.process.returncode, out, err, time.monotonic() - self.start)

    def kill(self) -> None:
        """Kills it if it still runs, and the processes it has started, which have groups of their own."""
        if self.process.poll() is None:
            workers = psutil.Process(self.process.pid).children(recursive=True)
            os.killpg(self.process.pid, signal.SIGKILL)
            for worker in workers:
                if worker.is_running():
                    worker.kill()
            self.process.wait()


class Folder:
    """A folder with a student and a teacher, and the launches that train there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = [save_model(path / "student", make_model(0)), save_model(path / "teacher", make_model(1))]

    def start(self, config: str, name: str, *arguments: str, overrides: tuple[str, ...] = TWO) -> Launch:
        """Starts `launch_script.py`, whose output_dir is `name`."""
        student, teacher = self.models
        given = ["--model", student, "--teacher", teacher, "--output_dir", str(self.path / name), *arguments]
        log = self.path / f"{name}-{len(list(self.path.glob('*.err')))}"
        return Launch(config, log, [str(SCRIPT), *given], overrides)

    def run(self, config: str, name: str, *arguments: str, overrides: tuple[str, ...] = TWO) -> Ended:
        """Starts it and waits for it."""
        return self.start(config, name, *arguments, overrides=overrides).end()

    def saved(self, name: str, *, full: bool = False) -> dict[str, Tensor]:
        """What the launch has saved."""
        return load_file(self.path / name / ("model.safetensors" if full else "adapter_model.safetensors"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, tuple[Ended, dict[str, Tensor]]]]:
    """What one process with the batch of two comes to, with an adapter and (True) with all weights."""
    alone = Folder(tmp_path_factory.mktemp("single"))
    ended = {}
    for full in (False, True):
        arguments = ["--per_device_train_batch_size", "8", *(["--full"] if full else [])]
        launch = alone.run("single.yaml", f"full{full}", *arguments, overrides=())
        ended[full] = launch, alone.saved(f"full{full}", full=full)
    yield ended


def check_as_single(ended: Ended, trained: dict[str, Tensor], single: tuple[Ended, dict[str, Tensor]]) -> None:
    """Fails unless a launch ended well and came to the losses and weights of one process."""
    alone, expected = single
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.result["losses"] == pytest.approx(alone.result["losses"], abs=1e-5)
    assert trained.keys() == expected.keys()
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def complaints(ended: Ended) -> list[str]:
    """Lines on stderr that have to do with the configuration; a launch that goes well has none."""
    about = re.compile(r"fsdp|accelerate|mixed.?precision|parallelism|not passed", re.IGNORECASE)
    return [line for line in ended.stderr.splitlines() if about.search(line)]


def free_port() -> str:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


# ---- The files


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_key_of_a_configuration(path: Path) -> None:
    """Unknown keys at the top are an error in accelerate; within a section it takes them, and ignores them without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config: Any = load_config_from_file(str(path))
    options = launch_command_parser()
    destinations = {action.dest for action in options._actions}
    for key, value in yaml.safe_load(path.read_text()).items():
        if isinstance(value, dict):
            assert set(value) <= destinations, f"{key}: unknown {set(value) - destinations}"
            assert getattr(config, key) == value
        else:
            assert key in HANDLED or options.get_default(key) is None, f"`accelerate launch` ignores {key} in a file"
    replaced = {key for key in config.fsdp_config if ARGUMENT_KEY_MAPPING.get(key, key) != key}
    assert not replaced, f"{replaced} are keys of FSDP1"


def test_the_configurations_are_those_that_are_launched_below() -> None:
    assert {path.stem for path in CONFIGS.glob("*")} == {"single", "ddp", "fsdp2", "fsdp2_offload", "multi_node"}


# ---- Launches


def test_single_trains_and_saves_an_adapter_that_loads(single: dict[bool, tuple[Ended, dict[str, Tensor]]]) -> None:
    """Nothing is overridden."""
    ended, saved = single[False]
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.result["processes"] == 1
    assert complaints(ended) == []
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)


def test_the_trainers_bf16_decides(folder: Folder) -> None:
    """Nothing is overridden. That `mixed_precision` is 'no' in the files does not keep the trainer from bf16."""
    assert folder.run("single.yaml", "bf16", "--bf16", overrides=()).result["mixed_precision"] == "bf16"


@pytest.mark.parametrize(("config", "kind"), [("ddp", "MULTI_CPU"), ("fsdp2", "FSDP"), ("fsdp2_offload", "FSDP")])
def test_two_processes_train_an_adapter_as_one_does(
    folder: Folder, single: dict[bool, tuple[Ended, dict[str, Tensor]]], config: str, kind: str
) -> None:
    """Overridden: `num_processes`, and what is said at the head of this file. Not `mixed_precision`, `gpu_ids` or the port."""
    ended = folder.run(f"{config}.yaml", "student-out")
    check_as_single(ended, folder.saved("student-out"), single[False])
    assert (ended.result["processes"], ended.result["distributed_type"]) == (2, kind)
    assert ended.result["meshes"] == ([[2]] if kind == "FSDP" else [[]])
    assert complaints(ended) == []
    model: Any = AutoPeftModelForCausalLM.from_pretrained(str(folder.path / "student-out"))
    loaded = {name: value for name, value in weights(model).items() if "lora_B" in name}
    assert loaded
    assert all(value.abs().max() > 0 for value in loaded.values())


def test_fsdp2_trains_all_weights_as_one_process_does(
    folder: Folder, single: dict[bool, tuple[Ended, dict[str, Tensor]]]
) -> None:
    """Overridden: `num_processes`, and what is said at the head of this file."""
    ended = folder.run("fsdp2.yaml", "student-out", "--full")
    check_as_single(ended, folder.saved("student-out", full=True), single[True])
    assert ended.result["meshes"] == [[2]]
    load: Any = AutoModelForCausalLM.from_pretrained
    _, info = load(str(folder.path / "student-out"), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_two_machines_train_as_one_process_does(folder: Folder, single: dict[bool, tuple[Ended, dict[str, Tensor]]]) -> None:
    """Two launchers on 127.0.0.1 with two processes each, which share the weights; the other two hold copies.

    Overridden: `num_processes` (4), `parallelism_config_dp_shard_size` (2), `main_process_ip`, `main_process_port`, and
    `machine_rank`, as a user does; and what is said at the head of this file.
    """
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", free_port())
    overrides = ("--num_processes", "4", "--parallelism_config_dp_shard_size", "2", *address)
    machines = [
        folder.start(
            "multi_node.yaml",
            "student-out",
            *("--per_device_train_batch_size", "2"),
            overrides=(*overrides, "--machine_rank", str(rank)),
        )
        for rank in (0, 1)
    ]
    try:
        ended = [machine.end() for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    check_as_single(ended[0], folder.saved("student-out"), single[False])
    assert (ended[0].result["processes"], ended[0].result["distributed_type"]) == (4, "FSDP")
    assert ended[0].result["meshes"] == [[2, 2]]
    assert ended[1].returncode == 0, ended[1].stderr[-5000:]
    assert "RESULT" not in ended[1].stdout
    assert [line for machine in ended for line in complaints(machine)] == []


def test_fsdp1_is_refused(folder: Folder) -> None:
    """Overridden beside the version: the loading that in FSDP1 needs a GPU, without which accelerate would fail first."""
    ended = folder.run("fsdp2.yaml", "student-out", overrides=(*TWO, *FSDP1))
    assert ended.returncode != 0
    assert "ValueError: The accelerate configuration asks for FSDP1" in ended.stderr
    assert "Set `fsdp_version: 2` in its fsdp_config" in ended.stderr
    assert not (folder.path / "student-out.steps").exists()


@pytest.mark.parametrize("config", ["ddp.yaml", "fsdp2.yaml"])
def test_a_process_that_fails_ends_the_launch(folder: Folder, config: str) -> None:
    ended = folder.start(config, "student-out", "--reward_fails").end(60)
    assert ended.returncode != 0
    assert f"RuntimeError: {ERROR}" in ended.stderr
    assert not (folder.path / "student-out.steps").exists()


@pytest.mark.parametrize("config", ["ddp.yaml", "fsdp2.yaml"])
def test_a_launch_that_is_stopped_by_sigterm_goes_on_where_it_was(folder: Folder, config: str) -> None:
    """The signal goes to `accelerate launch` only, as from a job scheduler, and in training, not between launches."""
    arguments = ("--max_steps", "30", "--stoppable")
    whole = folder.run(config, "whole", *arguments)
    assert whole.result["step"] == 30
    launch = folder.start(config, "stopped", *arguments, "--seconds_per_step", "0.2")
    wait_for_steps(folder.path / "stopped.steps", 3, launch)
    launch.process.terminate()
    stopped = launch.end(60)
    checkpoints = list((folder.path / "stopped").glob("checkpoint-*"))
    assert len(checkpoints) == 1, stopped.stderr[-5000:]
    checkpoint = checkpoints[0]
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 3 <= step < 30
    assert stopped.result["step"] == step
    assert steps(folder.path / "stopped.steps") == [*range(1, step + 1)]

    resumed = folder.run(config, "stopped", *arguments, "--resume_from_checkpoint", str(checkpoint))
    assert resumed.returncode == 0, resumed.stderr[-5000:]
    assert resumed.result["losses"] == whole.result["losses"]
    assert steps(folder.path / "stopped.steps") == [*range(1, 31)]
    expected, found = folder.saved("whole"), folder.saved("stopped")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.slow
def test_the_demo_learns_with_two_processes_as_with_one(tmp_path: Path) -> None:
    """The same completions, and so the same student: both runs recovered 0.959 of the gap.

    Halved, so that a step is the same: the batch of each process. Overridden: `num_processes`, and `use_cpu` of the trainer.
    """
    halved = ["--per_device_train_batch_size", "64", "--per_device_eval_batch_size", "250"]
    script = [str(ROOT / "examples/distill.py"), *halved, "--use_cpu", "--output_dir", str(tmp_path / "student")]
    ended = Launch("ddp.yaml", tmp_path / "demo", script, TWO).end(600)
    assert ended.returncode == 0, ended.stderr[-5000:]
    (recovered,) = re.findall(r"gap recovery (\S+)", ended.stdout)
    assert float(recovered) >= 0.85
    assert (tmp_path / "student/adapter_model.safetensors").is_file()
    assert (tmp_path / "student/curves.png").is_file()


def steps(path: Path) -> list[int]:
    """The steps that are done."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_for_steps(path: Path, number: int, launch: Launch) -> None:
    """Waits until so many steps are done."""
    while len(steps(path)) < number:
        if launch.process.poll() is not None or time.monotonic() - launch.start > SECONDS:
            pytest.fail(f"no {number} steps\n{launch.end(1).stderr[-5000:]}")
        time.sleep(0.05)
