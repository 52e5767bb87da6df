"""`trl-opd train` over several processes: starts them as `accelerate launch` does, passes signals on, says once what failed.

Imports torch only where there is something to launch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .command_line import UsageError, read_config

CONFIGS = Path(__file__).parent / "accelerate_configs"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORKER = "TRL_OPD_LAUNCHED"
"""Set in the environment of processes that are started here."""
AT_ONCE = 1.0
"""Seconds after a signal from which the same again means: at once. Sooner it is the same keystroke on another way."""


def launch_options(argv: Sequence[str]) -> list[str]:
    """The options of `accelerate launch` that a command line asks for; none if this process is the only one.

    Raises:
        UsageError: If there is no such configuration.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--accelerate_config")
    for name in ("num_processes", "machine_rank", "main_process_port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--main_process_ip")
    _, from_file = read_config(argv)
    parser.set_defaults(**{name: value for name, value in from_file.items() if name in vars(parser.parse_args([]))})
    try:
        given = vars(parser.parse_known_args(list(argv))[0])
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    name = given.pop("accelerate_config") or ("ddp" if (given["num_processes"] or 1) > 1 else "single")
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(known.stem for known in CONFIGS.glob("*.yaml")))
        raise UsageError(f"--accelerate_config is {name}, which is no file and none of {names}.")
    given = {option: value for option, value in given.items() if value is not None}
    if path == CONFIGS / "single.yaml":
        if given.pop("num_processes", 1) > 1 or given:
            raise UsageError("--accelerate_config single is one process on one machine; take ddp or fsdp2 for more.")
        return []
    return ["--config_file", str(path), *(word for option, value in given.items() for word in (f"--{option}", str(value)))]


def launch(options: Sequence[str], module: str, argv: Sequence[str]) -> int:
    """Runs a module in the processes that `options` ask for; returns 0, 1, or 128 + the number of a signal.

    What a process that failed has to say is printed once, by this one.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args: Any = launch_command_parser().parse_args([*options, "-m", module, *argv])
    args.signals_to_handle = "SIGHUP,SIGQUIT"  # of torchrun, which would give processes 30 s for a step and a checkpoint
    os.environ[WORKER] = "1"
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of torchrun, which would log each process that ends
    with passed_on() as received:
        try:
            launch_command(args)
        except ChildFailedError as error:
            said, status = _first_failure(error)
            print("trl-opd train: interrupted; nothing more was saved" if received else said, file=sys.stderr)
            return 128 + received[0] if received else status
        except SignalException as error:  # older torchruns listen themselves, and give processes 30 s
            _send(signal.SIGKILL, recursive=True)  # to those that are left
            return 128 + error.sigval
        except subprocess.CalledProcessError as error:  # one process only, which has said why
            return 128 + received[0] if received else max(1, error.returncode)
    return 128 + received[0] if received else 0


@contextmanager
def passed_on() -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to the processes started here, and ends them when it comes again; gives those received."""
    received: list[int] = []
    first = 0.0

    def receive(number: int, frame: Any) -> None:
        nonlocal first
        again = bool(received) and time.monotonic() - first > AT_ONCE
        if received and not again:
            return
        first = time.monotonic()
        received.append(number)
        _send(signal.SIGKILL if again else number, recursive=again)

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(number: int, *, recursive: bool) -> None:
    """Sends a signal to the processes started here, and to theirs."""
    import psutil

    for process in psutil.Process().children(recursive=recursive):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


def _first_failure(error: Any) -> tuple[str, int]:
    """What the process that failed first has said, and the exit status it told. Others fail in consequence.

    Torch tells the times of failures in seconds only, which are the same; those of the files in which they are said differ.
    """
    said = {rank: failure for rank, failure in error.failures.items() if Path(failure.error_file).is_file()}
    if not said:
        rank, failure = error.get_first_failure()
        return f"trl-opd train: error: process {rank} ended: {failure.message}", 1
    failure = min(said.values(), key=lambda failure: Path(failure.error_file).stat().st_mtime_ns)
    told: dict[str, Any] = failure.message
    return str(told["message"]), told.get("status", 1)  # some are killed on their way out, after they have said why
