"""Real FSDP on a machine without GPUs: accelerate is told that processes on a CPU are a multi-GPU launch.

    accelerate launch --config_file trl_opd/accelerate_configs/fsdp2.yaml tests/fsdp_on_cpu.py script.py ...

runs script.py so. All else (launcher, sharding, collectives, checkpoints) is what it is on GPUs, over gloo in place of NCCL.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.state import PartialState


def pretend() -> None:
    """To be called before anything asks accelerate for its state."""

    def backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = backend  # type: ignore[method-assign]
    PartialState.set_device = device  # type: ignore[method-assign]


if __name__ == "__main__":
    pretend()
    torch.set_num_threads(1)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
