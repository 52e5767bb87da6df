"""What a run carries from step to step beside the weights and the optimizer, and how a checkpoint keeps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import ScoredBatch

Step = tuple[list[ScoredBatch], Tensor]
"""An optimizer step's micro-batches, and what the loss of each is divided by."""


@dataclass
class Progress:
    """Steps that are rolled out but not trained yet, and the tokens seen so far."""

    pending: deque[Step] = field(default_factory=deque)
    sampled_at: int = 0
    """Optimizer steps behind the weights that sampled them."""
    tokens: float = 0.0
    """Action tokens of all rollouts, over all processes."""
    teacher_tokens: float = 0.0
    """Tokens the teacher has read, prompts included."""
    position: tuple[int, int] = (0, 0)
    """How often the data was gone through before a restored step, and micro-batches trained on since."""
    restored_batches: int = 0
    """Micro-batches of a restored rollout that the data loader, which resumes at the last trained step, is yet to pass."""

    def skip_rolled_out(self, epoch_iterator: Iterator[Any]) -> None:
        """After a resume, moves the data past the rows of the rollout that is still in hand."""
        for _ in islice(epoch_iterator, self.restored_batches):
            pass
        self.restored_batches = 0

    def save(self, folder: str, process_index: int, num_processes: int) -> None:
        """Writes this process's part of a checkpoint."""
        pending = [([batch.state_dict() for batch in batches], count.cpu()) for batches, count in self.pending]
        path = _path(folder, process_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {
            "num_processes": num_processes,
            "sampled_at": self.sampled_at,
            "tokens": self.tokens,
            "teacher_tokens": self.teacher_tokens,
            "position": self.position,
        }
        torch.save({"pending": pending, **saved}, path)

    @classmethod
    def load(cls, folder: str, process_index: int, num_processes: int, device: torch.device) -> Progress:
        """Reads what `save` wrote; a checkpoint without it (weights only) starts afresh.

        Raises:
            ValueError: If it was written by another number of processes, or this one's part is missing.
        """
        path = _path(folder, process_index)
        if not path.is_file() and not _path(folder, 0).is_file():
            return cls()
        saved = torch.load(path if path.is_file() else _path(folder, 0), weights_only=True)
        if saved["num_processes"] != num_processes:
            raise ValueError(
                f"The checkpoint '{folder}' was written by {saved['num_processes']} processes, but there are {num_processes} "
                f"now: each has rollouts and random states of its own. Launch with --num_processes {saved['num_processes']} "
                "to go on exactly, or start a new run from its weights by passing the folder as `model`."
            )
        if not path.is_file():
            raise ValueError(
                f"The checkpoint '{folder}' was written by {num_processes} processes, but lacks {path.name}, what process "
                f"{process_index} had rolled out. Copy it from the machine of that process, or save to a shared folder."
            )
        pending = deque(
            ([ScoredBatch.from_state_dict(state, device) for state in states], count.to(device))
            for states, count in saved["pending"]
        )
        return cls(
            pending=pending,
            sampled_at=saved["sampled_at"],
            tokens=saved["tokens"],
            teacher_tokens=saved["teacher_tokens"],
            position=saved["position"],
            restored_batches=sum(len(batches) for batches, _ in pending),
        )


def _path(folder: str, process_index: int) -> Path:
    return Path(folder) / f"distillation_state_{process_index}.pt"
