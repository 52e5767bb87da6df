"""Two processes that tests run functions in, under DDP or FSDP2, over gloo on the CPU."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 120
"""What a function may take before it counts as hanging."""

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "one": {},
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    },
}


class Processes:
    """Persistent worker processes; started once, since importing the stack takes longer than most tests."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: list[Any] = []

    def _start(self) -> None:
        context = get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = [context.Pipe() for _ in range(self.number)]
        self.connections = [ours for ours, _ in pipes]
        self.workers = [
            context.Process(target=_serve, args=(rank, self.number, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, how: str, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        """What `function` returns on each process, launched as `how` says; `environment` adds variables.

        Raises:
            RuntimeError: If it failed somewhere; the traceback is in the message.
            TimeoutError: If it did not come back.
        """
        if not self.workers:
            self._start()
        environment = ENVIRONMENTS[how] | more.pop("environment", {})
        for connection in self.connections:
            connection.send((environment, function, args, more))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(results) < len(self.connections):
            waiting = [rank for rank in range(len(self.connections)) if rank not in results]
            ready = wait([self.connections[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            errors = [error for error, _ in results.values() if error]
            if not ready:
                self.stop()
                raise TimeoutError("\n".join([f"processes {waiting} did not come back from {function.__name__}", *errors]))
            for rank in waiting:
                if self.connections[rank] in ready:
                    results[rank] = self.connections[rank].recv()
                    if results[rank][0]:
                        deadline = time.monotonic() + 5  # the others may wait for this one for ever
        if errors := [error for error, _ in results.values() if error]:
            raise RuntimeError("\n".join(errors))
        return [results[rank][1] for rank in range(len(self.connections))]

    def stop(self) -> None:
        """Ends the workers; the next run starts others."""
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.workers = []


def launched(how: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """`function(...)` in this process, as accelerate would have launched it."""
    with _environment(ENVIRONMENTS[how] | more.pop("environment", {})):
        return function(*args, **more)


def _serve(rank: int, number: int, port: int, connection: Connection) -> None:
    import torch

    from .fsdp_on_cpu import pretend

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo")
    from accelerate.state import PartialState

    own = PartialState._prepare_backend, PartialState.set_device
    while True:
        environment, function, args, more = connection.recv()
        with _environment(environment):
            PartialState._prepare_backend, PartialState.set_device = own  # type: ignore[method-assign]
            if "ACCELERATE_USE_FSDP" in environment:
                pretend()
            try:
                connection.send((None, function(*args, **more)))
            except BaseException:
                connection.send((traceback.format_exc(), None))


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Inside, accelerate finds these variables and no state of earlier launches."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    os.environ.update(variables)
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
