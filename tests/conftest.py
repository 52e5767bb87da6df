"""Set-up that every test shares."""

from collections.abc import Iterator

import pytest
import torch

from .processes import Processes

torch.set_num_threads(1)  # the models are tiny: a second thread only waits, and on a busy machine for long


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes, for tests marked `dist`."""
    processes = Processes(2)
    yield processes
    processes.stop()
