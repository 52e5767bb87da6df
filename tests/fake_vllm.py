"""A small fake of vLLM's server, in this process, over a tiny model: its numbers are true, its faults are ours.

    with FakeVLLM(make_model(1)) as server:
        server.faults.errors = [500, 500]  # the next two requests for completions
        ... server.url, server.requests ...

It speaks, in the dialect of vLLM 0.32: GET /health, /version, /v1/models; POST /tokenize, /v1/completions (one prompt, as
ids), /v1/load_lora_adapter, /v1/unload_lora_adapter. As there, log-probs of generated tokens are those at temperature 1 unless
`logprobs_mode="processed_logprobs"`, and those of the prompt always are; -inf comes as -9999.0; an adapter has no
`max_model_len` of its own; a load answers with plain text.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .helpers import make_model, make_tokenizer


@dataclass
class Faults:
    """What is wrong with the server; change it at any time. Of completions only, unless it says otherwise."""

    errors: list[int] = field(default_factory=list)
    """Statuses of the next requests, each used once."""
    errors_of: str = "/v1/completions"
    """The path that `errors` are for."""
    retry_after: int | None = None
    """Header of these errors, in seconds."""
    seconds: float = 0.0
    """Until each answer."""
    half: int = 0
    """So many next answers have only the first half of the positions."""
    wrong_ids: int = 0
    """So many next answers are about the ids + 1."""
    no_logprobs: int = 0
    """So many next answers come without log-probs."""
    broken: int = 0
    """So many next answers end in the middle of the JSON."""
    nan: int = 0
    """So many next answers have NaN for the last log-prob of the prompt."""
    ignores_adapters: bool = False
    """Adapter loads are answered with success, and change nothing: the first adapter that was loaded answers (or the base)."""
    stale_prefix_cache: bool = False
    """The distribution after a prompt comes from whichever adapter read that prompt first."""
    ignores_temperature: bool = False
    """Everything is sampled and scored at temperature 1."""
    prompt_temperature: bool = False
    """No fault, but what no vLLM does yet: log-probs of the prompt are those at the request's temperature."""
    top_first: bool = False
    """The likeliest token is listed before the one that was asked for (or sampled), at each position."""
    no_tokenize: bool = False
    """There is no /tokenize."""
    adds: float = 0.0
    """Added to each log-prob of a prompt, as if it were no log-prob."""
    dies_of: int = 0
    """More requests at once than so many kill it; 0 for none."""
    mixes_up: int = 0
    """Of more requests at once than so many it scores the prompts a nat a token too low; 0 for none."""


class FakeVLLM:
    """See the head of this file.

    Args:
        model: The base that is served.
        tokenizer: Its tokenizer.
        name: The base's served name.
        max_model_len: Most tokens of prompt and completion.
        api_key: What requests must carry, but for /health and /version.
        logprobs_mode: As vLLM's option.
        port: 0 for any.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "base",
        max_model_len: int = 128,
        api_key: str = "",
        logprobs_mode: str = "raw_logprobs",
        port: int = 0,
    ) -> None:
        self.base = copy.deepcopy(model if model is not None else make_model(0)).eval()
        self.tokenizer = tokenizer or make_tokenizer()
        self.name, self.max_model_len, self.api_key, self.logprobs_mode = name, max_model_len, api_key, logprobs_mode
        self.faults = Faults()
        self.adapters: dict[str, Any] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """(path, payload) of all that were received, refused ones too."""
        self.counts: Counter[int] = Counter()
        """Answers to completions, by status."""
        self.most_at_once = 0
        self._at_once, self._port = 0, port
        self._first_reader: dict[tuple[int, ...], Any] = {}
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> FakeVLLM:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens, or will again."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> FakeVLLM:
        """Listens; after a `stop`, on the same port."""
        server = _Server(("127.0.0.1", self._port), type("Handler", (_Handler,), {"fake": self}))
        self._port, self._server = server.server_address[1], server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self, *, forget: bool = True) -> None:
        """Is down, as if killed: loaded adapters are lost unless `forget` is False."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if forget:
            self.adapters.clear()
            self._first_reader.clear()

    # ---- Answers: (status, JSON or text)

    def models(self) -> tuple[int, Any]:
        base = {"id": self.name, "object": "model", "owned_by": "vllm", "root": self.name, "parent": None}
        adapters = [{**base, "id": name, "parent": self.name, "max_model_len": None} for name in self.adapters]
        return 200, {"object": "list", "data": [{**base, "max_model_len": self.max_model_len}, *adapters]}

    def tokenize(self, payload: dict[str, Any]) -> tuple[int, Any]:
        if self.faults.no_tokenize:
            return 404, {"detail": "Not Found"}
        ids = self.tokenizer(payload["prompt"], add_special_tokens=payload.get("add_special_tokens", True))["input_ids"]
        return 200, {"count": len(list(ids)), "max_model_len": self.max_model_len, "tokens": list(ids), "token_strs": None}

    def load(self, payload: dict[str, Any]) -> tuple[int, Any]:
        name = payload["lora_name"]
        if name in self.adapters and not payload.get("load_inplace"):
            return _error(400, f"The lora adapter '{name}' has already been loaded. If you want to load it in place, set it.")
        if self.faults.ignores_adapters:
            self.adapters[name] = next(iter(self.adapters.values()), self.base)
        else:
            adapted = PeftModel.from_pretrained(copy.deepcopy(self.base), payload["lora_path"])
            self.adapters[name] = adapted.eval()
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, payload: dict[str, Any]) -> tuple[int, Any]:
        if self.adapters.pop(payload["lora_name"], None) is None:
            return _error(404, f"The lora adapter '{payload['lora_name']}' cannot be found.")
        return 200, f"Success: LoRA adapter '{payload['lora_name']}' removed successfully."

    def completions(self, payload: dict[str, Any]) -> tuple[int, Any]:
        name, ids, max_tokens = payload.get("model") or self.name, payload["prompt"], payload.get("max_tokens", 16)
        if name != self.name and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        if not ids or not all(isinstance(i, int) for i in ids):
            return _error(400, "This fake takes one prompt, as a list of ids.")
        if max(ids) >= self.base.config.vocab_size:
            return _error(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) >= self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens, not {len(ids)}+1.")
        payload = {**payload, "max_tokens": min(max_tokens, self.max_model_len - len(ids))}
        if _takes(self.faults, "wrong_ids"):
            ids = [(i + 1) % self.base.config.vocab_size for i in ids]
        model = self.adapters.get(name, self.base)
        with self._lock, torch.no_grad():
            choice = self._generate(model, ids, payload)
            if payload.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(model, ids, payload)
        choice["prompt_token_ids"] = ids if payload.get("return_token_ids") else None
        if _takes(self.faults, "half"):
            choice = {key: value[: len(value) // 2] if isinstance(value, list) else value for key, value in choice.items()}
            if choice["logprobs"]:
                halves = {key: value[: len(value) // 2] for key, value in choice["logprobs"].items()}
                choice["logprobs"] = halves
        if _takes(self.faults, "no_logprobs"):
            choice |= {"logprobs": None, "prompt_logprobs": None}
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids), "completion_tokens": 0}
        return 200, {"id": "cmpl-0", "object": "text_completion", "model": name, "choices": [choice], "usage": usage}

    def fail_for_good(self, payload: dict[str, Any]) -> tuple[int, Any]:
        """Not of vLLM: lets another process put the server out of order."""
        self.faults.errors = [500] * 10_000
        return 200, {}

    # ---- Numbers

    def _temperature(self, payload: dict[str, Any]) -> float:
        given = payload.get("temperature")
        return 1.0 if given is None or self.faults.ignores_temperature else given

    def _logps(self, model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
        """(T, V): row t is the distribution of what follows `ids[: t + 1]`."""
        return (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)

    def _entry(self, logps_V: Tensor, token: int, num_top: int) -> dict[str, Any]:
        """The log-probs of one position: of `token`, and of the likeliest."""
        likeliest = logps_V.topk(num_top).indices.tolist()
        order = [*likeliest, token] if self.faults.top_first else [token, *likeliest]
        if self.faults.top_first and not num_top:
            order = [int(logps_V.argmax()), token]
        ranks = {i: int((logps_V > logps_V[i]).sum()) + 1 for i in order}
        return {
            str(i): {
                "logprob": max(float(logps_V[i]), -9999.0),
                "rank": ranks[i],
                "decoded_token": str(self.tokenizer.decode([i])),
            }
            for i in dict.fromkeys(order)
        }

    def _prompt_logprobs(self, model: Any, ids: list[int], payload: dict[str, Any]) -> list[Any]:
        logps = self._logps(model, ids, self._temperature(payload) if self.faults.prompt_temperature else 1.0)
        entries = [self._entry(logps[t - 1], ids[t], payload["prompt_logprobs"]) for t in range(1, len(ids))]
        if _takes(self.faults, "nan"):
            entries[-1] = {key: {**value, "logprob": float("nan")} for key, value in entries[-1].items()}
        shift = self.faults.adds - (0 < self.faults.mixes_up < self._at_once)
        entries = [{key: {**v, "logprob": v["logprob"] + shift} for key, v in entry.items()} for entry in entries]
        return [None, *entries]

    def _generate(self, model: Any, prompt: list[int], payload: dict[str, Any]) -> dict[str, Any]:
        temperature, ids, entries, reason, stop_reason = self._temperature(payload), list(prompt), [], "length", None
        scored_at = temperature if self.logprobs_mode.startswith("processed") and temperature > 0 else 1.0
        generator = torch.Generator()
        generator.manual_seed(payload["seed"]) if payload.get("seed") is not None else generator.seed()
        eos, stops = self.tokenizer.eos_token_id, payload.get("stop_token_ids") or []
        first_reader = self._first_reader.setdefault(tuple(prompt), model)
        for step in range(payload.get("max_tokens", 16)):
            reader = first_reader if self.faults.stale_prefix_cache and step == 0 else model
            logits_V = reader(torch.tensor([ids])).logits[0, -1].float()
            for token_id, bias in (payload.get("logit_bias") or {}).items():
                logits_V[int(token_id)] += bias
            if temperature > 0:
                token = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
            else:
                token = int(logits_V.argmax())
            entries.append(self._entry((logits_V / scored_at).log_softmax(-1), token, payload.get("logprobs") or 0))
            ids.append(token)
            if token in stops or (token == eos and not payload.get("ignore_eos")):
                reason, stop_reason = "stop", token if token in stops else None
                break
        new = ids[len(prompt) :]
        named = [{self._token(int(i), payload): value["logprob"] for i, value in entry.items()} for entry in entries]
        own = [entry[str(i)]["logprob"] for entry, i in zip(entries, new, strict=True)]
        logprobs = {
            "tokens": [self._token(i, payload) for i in new],
            "token_logprobs": own,
            "top_logprobs": named,
            "text_offset": [0] * len(new),
        }
        return {
            "index": 0,
            "text": self.tokenizer.decode(new, skip_special_tokens=True),
            "logprobs": logprobs if payload.get("logprobs") is not None else None,
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "token_ids": new if payload.get("return_token_ids") else None,
            "prompt_logprobs": None,
        }

    def _token(self, token: int, payload: dict[str, Any]) -> str:
        return f"token_id:{token}" if payload.get("return_tokens_as_token_ids") else str(self.tokenizer.decode([token]))


def requests_ended() -> None:
    """Returns once no thread has a request under way. A server that comes back would load adapters for one, which draws from
    torch's generator while the test makes its next model."""
    for thread in threading.enumerate():
        if thread.name.startswith("servers"):
            thread.join(timeout=10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.requests.append((self.path, {}))
        if self.path == "/health":
            self._answer(200, "")
        elif self.path == "/version":
            self._answer(200, {"version": "0.32.0"})
        else:
            found = self.fake.models() if self.path == "/v1/models" else (404, {"detail": "Not Found"})
            self._answer(*(self._refusal() or found))

    def do_POST(self) -> None:
        fake, payload = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append((self.path, payload))
        with fake._counting:
            fake._at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake._at_once)
        try:
            if self.path == "/v1/completions":
                time.sleep(fake.faults.seconds)
            if 0 < fake.faults.dies_of < fake._at_once:
                fake.fail_for_good({})
            status, found = self._refusal() or self._found(payload)
        finally:
            with fake._counting:
                fake._at_once -= 1
        if self.path == "/v1/completions":
            fake.counts[status] += 1
        self._answer(status, found)

    def _found(self, payload: dict[str, Any]) -> tuple[int, Any]:
        fake = self.fake
        answers = {
            "/tokenize": fake.tokenize,
            "/v1/completions": fake.completions,
            "/v1/load_lora_adapter": fake.load,
            "/v1/unload_lora_adapter": fake.unload,
            "/stop": fake.fail_for_good,
        }
        return answers[self.path](payload) if self.path in answers else (404, {"detail": "Not Found"})

    def _refusal(self) -> tuple[int, Any] | None:
        key, faults = self.fake.api_key, self.fake.faults
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            return 401, {"error": "Unauthorized"}
        with self.fake._counting:
            fails = self.path == faults.errors_of and faults.errors
            return _error(faults.errors.pop(0), "the engine is out of order") if fails else None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, found: Any) -> None:
        if self.server is not self.fake._server:  # it was stopped meanwhile: the connection breaks
            self.close_connection = True
            return
        body = (found if isinstance(found, str) else json.dumps(found)).encode()
        if self.path == "/v1/completions" and status == 200 and _takes(self.fake.faults, "broken"):
            body = body[: len(body) // 2]
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # a kept connection would outlive `stop`
        if status >= 500 and self.fake.faults.retry_after is not None:
            self.send_header("Retry-After", str(self.fake.faults.retry_after))
        self.end_headers()
        self.wfile.write(body)


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


def _takes(faults: Faults, name: str) -> bool:
    """Whether the fault strikes this time."""
    left = getattr(faults, name)
    setattr(faults, name, max(0, left - 1))
    return left > 0
