"""A real vLLM server on the CPU, for tests marked `vllm`, in an environment of its own, which `make vllm-env` makes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .helpers import make_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SECONDS = 300
"""What a start may take."""


def tiny_model() -> PreTrainedModel:
    """A Llama that vLLM can serve, made to go wrong: it samples padding rows, and its generation config is nobody's wish."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 256, "initializer_range": 0.15}
    model = make_model(0, vocab_size=48, **sizes)
    with torch.no_grad():
        model.lm_head.weight[43:] *= 4  # type: ignore[index]  # ids that make_tokenizer does not have
    model.generation_config.update(do_sample=True, top_k=3, temperature=0.3, repetition_penalty=1.3, eos_token_id=[1, 7])
    return model


def vllm_python() -> str:
    """The interpreter that has vLLM."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = os.environ.get("TRL_OPD_VLLM_PYTHON") or str(cache / "trl_opd/vllm/bin/python")
    assert Path(python).is_file(), f"There is no {python}. Make it with `make vllm-env`, or name another: TRL_OPD_VLLM_PYTHON."
    return python


def _end_with_parent() -> None:
    """Linux ends a process that has called this when the thread that started it ends, however that comes."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class VLLMServer:
    """Serves the model in a folder as "base", in fp32, with adapters that may be loaded while it runs.

    Args:
        model: The folder.
        log: File for what the server prints.
        options: More of its command-line options.
    """

    def __init__(self, model: str, log: Path, *options: str) -> None:
        self.model, self.log, self.options = model, log, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, or will again."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> VLLMServer:
        """Starts it; with `wait`, until it answers."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))},
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--enable-lora", "--max-lora-rank", "32", "--max-loras", "2"]
        # lm_head left out: with it, vLLM 0.32 fails when it scores several prompts at once (vllm-project/vllm#16668)
        command += ["--lora-target-modules", *LINEAR]
        with self.log.open("ab") as log:
            # a session of its own: it starts processes, which `stop` ends with it
            self._process = subprocess.Popen(
                [*command, *self.options],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        if wait:
            self._wait()
        return self

    def stop(self) -> None:
        """Kills it, with the processes that it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def _wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            assert self._process is not None and self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise TimeoutError(f"no vLLM server after {SECONDS} s:\n{self.log.read_text()[-3000:]}")
