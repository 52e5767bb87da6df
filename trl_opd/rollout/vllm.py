"""Rollouts by vLLM servers, which serve the student's base model and get its adapter before each rollout.

How this differs from asking a server as it is:
1. Every sampling field is sent: what a request leaves out, the server fills in from the checkpoint's generation_config.
2. Token ids are sent and returned, text is not; a log-prob is looked up by its token's id and not by its place.
3. Ids that the tokenizer does not have, the padding rows of the vocabulary, get a bias of -100, so that they are never
   sampled. A list of the allowed ids would do the same, but has 150,000 numbers a request; there are a few hundred of these.
4. The log-probs must be those of the weights that are trained. The server's base is compared with the student's before the
   first rollout, and each rollout's log-probs with the trainer's own (`max_gap`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Completion, Rollout
from ..config import OnPolicyDistillationConfig
from ..processes import on_first_process
from ..servers import BadAnswer, Servers
from ..teachers import AdapterTeacher
from ..teachers.server import prompt_logps, scoring_request
from .publisher import AdapterPublisher

COMPLETIONS = "/v1/completions"
DIFFERENT_BASE = 0.25
"""Nats a token. Rounding is less (SmolLM2-135M in bf16 against fp32: 0.06), another model more (without three layers: 2)."""
LEAST_GAP = 1e-3
"""Nats a token. Rounding in fp32 is 1e-5; weights one update old are off by 0.009 at learning rate 1e-5, 0.09 at 1e-4."""


class VLLMEngine:
    """Samples from vLLM servers.

    Args:
        args: Sampling settings.
        servers: Replicas that serve the student's base.
        publisher: Brings the adapter to them.
        base: Name of the base among the served models.
        stop_ids: Every token id that ends a completion.
        vocab_size: Number of ids the policy ranges over.
        num_rows: Rows of the model's vocabulary, padding included.
        probe_ids: A text, by which the server's base is compared with the student's.
    """

    def __init__(
        self,
        args: OnPolicyDistillationConfig,
        servers: Servers,
        publisher: AdapterPublisher,
        *,
        base: str,
        stop_ids: list[int],
        vocab_size: int,
        num_rows: int,
        probe_ids: list[int],
    ) -> None:
        self.args, self.servers, self.publisher, self.base = args, servers, publisher, base
        self.stop_ids = [token for token in stop_ids if token < vocab_size]  # a server refuses ids that it does not have
        self.vocab_size, self.num_rows, self.probe_ids = vocab_size, num_rows, probe_ids
        self.max_gap: float | None = None
        self.whole_softmax = False

    def sync(self, model: PreTrainedModel | PeftModel) -> None:
        """Publishes the adapter if it has changed; see `RolloutEngine`."""
        assert isinstance(model, PeftModel), "make_engine refuses a student without adapter"
        if self.max_gap is None:
            ours_T = self._probe_logps(model, None)
            self.max_gap = on_first_process(lambda: self._compare(ours_T))
        if self.publisher.publish(model) and self.args.rollout_lag:
            self._check_adapter(self._probe_logps(model, cast(str, model.active_adapter)), self.max_gap)

    def generate(
        self,
        model: PreTrainedModel | PeftModel,
        prompts: list[list[int]],
        seeds: list[int] | None = None,
        limits: list[int] | None = None,
    ) -> list[Completion]:
        """Samples one completion for each prompt; see `RolloutEngine`. The servers' adapter is that of the last `sync`."""
        if seeds is None:
            seeds = torch.randint(2**62, (len(prompts),)).tolist()
        limits = limits or [self.args.max_completion_length] * len(prompts)
        payloads = [self._payload(*asked) for asked in zip(prompts, seeds, limits, strict=True)]
        return self.servers.ask_all(
            COMPLETIONS, payloads, lambda number, answer: self._completion(prompts[number], limits[number], answer)
        )

    def _payload(self, prompt: list[int], seed: int, limit: int) -> dict[str, Any]:
        return {
            "model": self.publisher.version,
            "prompt": prompt,
            "seed": seed,
            "max_tokens": limit,
            "min_tokens": 0,
            "temperature": self.args.temperature,
            "top_p": self.args.top_p,
            "top_k": self.args.top_k,
            "min_p": self.args.min_p or 0.0,
            "repetition_penalty": self.args.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # the server's own stop ids; ours are all in stop_token_ids
            "stop_token_ids": self.stop_ids,
            "logit_bias": {str(token): -100.0 for token in range(self.vocab_size, self.num_rows)},
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _completion(self, prompt: list[int], limit: int, answer: dict[str, Any]) -> Completion:
        """Reads an answer.

        Raises:
            BadAnswer: If it is not a completion as it was asked for.
        """
        choice = answer["choices"][0]
        ids, entries = choice["token_ids"], choice["logprobs"]["top_logprobs"]
        if choice["prompt_token_ids"] != prompt:
            raise BadAnswer(f"it follows another prompt: ids {choice['prompt_token_ids'][:8]}..., sent was {prompt[:8]}...")
        if not 1 <= len(ids) <= limit or len(entries) != len(ids):
            raise BadAnswer(f"it has {len(ids)} tokens with {len(entries)} log-probs, wanted are 1 to {limit} of each")
        if foreign := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise BadAnswer(f"it holds id {foreign[0]}, but the student's tokenizer has only {self.vocab_size}")
        stops = [token in self.stop_ids for token in ids]
        if any(stops[:-1]) or not (stops[-1] or len(ids) == limit):
            raise BadAnswer(
                f"its {len(ids)} tokens (finish_reason {choice['finish_reason']}) neither end with their first stop token nor "
                f"at the limit of {limit}"
            )
        logps = [float(entry[f"token_id:{token}"]) for token, entry in zip(ids, entries, strict=True)]
        if not all(map(math.isfinite, logps)):
            raise BadAnswer("a log-prob in it is not finite")
        return Completion(ids=ids, logps=logps, stopped=stops[-1])

    # ---- The server's base and the student's

    def _probe_logps(self, model: PeftModel, adapter: str | None) -> Tensor:
        """(T,) log-probs of the probe under the student with that adapter or none; under FSDP all processes must call this."""
        ids = Completion(self.probe_ids[1:], logps=[0.0] * len(self.probe_ids[1:]), stopped=False)
        probe = Rollout.build([self.probe_ids[:1]], [ids], [{}], pad_id=0, device=self.args.device)
        scorer = AdapterTeacher(lambda: model, adapter, temperature=1.0, vocab_size=self.num_rows, batch_size=1)
        return scorer.score(probe)[0].cpu()

    def _gap(self, ours_T: Tensor, answer: dict[str, Any]) -> float:
        """Nats a token by which a server's log-probs of the probe, in its answer, differ from ours in the mean."""
        theirs_T = torch.tensor(prompt_logps(answer, self.probe_ids, 1))
        return float((theirs_T - ours_T[1:]).abs().mean())

    def _check_adapter(self, ours_T: Tensor, max_gap: float) -> None:
        """Raises ValueError if a server scores the probe otherwise than the student; all processes must call this.

        A rollout that was written a step ahead comes when the student has moved on, so that it cannot be compared itself.
        """
        version = cast(str, self.publisher.version)
        request = scoring_request(version, self.probe_ids, 1.0)

        def compare() -> None:
            for gap in self.servers.ask_each(COMPLETIONS, request, partial(self._gap, ours_T)):
                if not gap <= max_gap:
                    raise ValueError(
                        f"The adapter '{version}' was published, but a rollout server's log-probs of a probe text differ by "
                        f"{gap:.4f} nats a token from those of the student as it is now; rounding explains {max_gap:.4f}. The "
                        "adapter did not take effect there (see the server's log). The last checkpoint resumes."
                    )

        on_first_process(compare)

    def _compare(self, ours_T: Tensor) -> float:
        """The gap, in nats a token, up to which the servers' weights count as the trainer's: twice that of the bases.

        Raises:
            ValueError: If a server has another base, or its log-probs do not follow the temperature.
        """
        gaps, request = [], scoring_request(self.base, self.probe_ids, 1.0)
        for url in self.servers.urls:
            server = Servers([url], timeout=self.servers.timeout)
            gaps.append(server.ask(COMPLETIONS, request, partial(self._gap, ours_T)))
            if not gaps[-1] < DIFFERENT_BASE:
                raise ValueError(
                    f"The model '{self.base}' on {url} is not the student's base: its log-probs of a probe text differ by "
                    f"{gaps[-1]:.2f} nats a token from those of the student without its adapter. Serve the base that the "
                    "student is trained on, with the same quantisation."
                )
            if self.args.temperature != 1 and not self.args.truncates_sampling:
                self._check_temperature(server)
        return max(LEAST_GAP, 2 * max(gaps))

    def _check_temperature(self, server: Servers) -> None:
        """Raises ValueError if the log-probs of what `server` samples are the same at any temperature."""
        requests = [{**scoring_request(self.base, self.probe_ids, at), "logprobs": 1} for at in (1.0, 2.0)]
        one, other = (server.ask(COMPLETIONS, request, _likeliest) for request in requests)
        if abs(one - other) < 1e-4:
            raise ValueError(
                f"The log-probs of {server.urls[0]} are the same at every temperature, but temperature is "
                f"{self.args.temperature}: they are not those of the distribution that it samples from. Start it with "
                "--logprobs-mode processed_logprobs."
            )


def _likeliest(answer: dict[str, Any]) -> float:
    """Log-prob of the likeliest token after a prompt, nats."""
    return max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())
