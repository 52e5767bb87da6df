"""Set-up that every test shares."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from .helpers import save_model
from .processes import Processes
from .vllm_server import VLLMServer, tiny_model

torch.set_num_threads(1)  # the models are tiny: a second thread only waits, and on a busy machine for long


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes, for tests marked `dist`."""
    processes = Processes(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """vLLM with `tiny_model`; a test that stops it must start it again."""
    folder = tmp_path_factory.mktemp("tiny_server")
    server = VLLMServer(save_model(folder / "model", tiny_model()), folder / "log", "--logprobs-mode", "processed_logprobs")
    yield server.start()
    server.stop()


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """vLLM with SmolLM2-135M."""
    from heal_pruned import load_smollm2  # takes a while to import

    folder = tmp_path_factory.mktemp("smollm2_server")
    model, tokenizer = load_smollm2()
    server = VLLMServer(save_model(folder / "model", model, cast(Any, tokenizer)), folder / "log")
    yield server.start()
    server.stop()
