"""A teacher that is a model in the training process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .in_process import InProcessTeacher


class ModelTeacher(InProcessTeacher):
    """Scores with a frozen model in eval mode.

    Args:
        model: The teacher; its parameters stop requiring gradients.
        scoring: As for `InProcessTeacher`.
    """

    def __init__(self, model: nn.Module, **scoring: Any) -> None:
        super().__init__(**scoring)
        self.model = model.requires_grad_(False).eval()

    def weights(self) -> nn.Module:
        """The model, as it is between scorings."""
        return self.model

    @contextmanager
    def scoring_model(self) -> Iterator[nn.Module]:
        """Inside, the model to call."""
        yield self.model.eval()


class OffloadedTeacher(ModelTeacher):
    """A `ModelTeacher` whose weights are in CPU memory; for scoring they are copied, and the copies dropped again.

    Args:
        model: The teacher, on the CPU.
        device: Where it scores.
        scoring: As for `InProcessTeacher`.
    """

    def __init__(self, model: nn.Module, device: torch.device, **scoring: Any) -> None:
        super().__init__(model, **scoring)
        self.device = device

    @contextmanager
    def scoring_model(self) -> Iterator[nn.Module]:
        """Inside, the model with its copies."""
        own = [(tensor, tensor.data) for tensor in (*self.model.parameters(), *self.model.buffers())]
        try:
            for tensor, data in own:
                tensor.data = data.to(self.device)
            yield self.model.eval()
        finally:
            for tensor, data in own:
                tensor.data = data
