"""Rollout engines: prompts in, completions with their sampled log-probabilities out. One engine a file."""

from typing import Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from ..batch import Completion
from .loading import make_engine as make_engine
from .transformers import TransformersEngine as TransformersEngine
from .vllm import VLLMEngine as VLLMEngine


class RolloutEngine(Protocol):
    """Samples from the student. A second engine is a second class with these members."""

    @property
    def max_gap(self) -> float | None:
        """Nats a token by which its log-probs may differ, in the mean, from the trainer's of the same weights.

        More is an error. None, where it samples from the trainer's own weights: then a gap at the first rollout is warned of.
        """
        ...

    @property
    def whole_softmax(self) -> bool:
        """Whether its log-probs are under the whole softmax also where top_p and its like truncate what is sampled.

        Otherwise the trainer computes them itself.
        """
        ...

    def sync(self, model: PreTrainedModel | PeftModel) -> None:
        """Makes it sample from `model`'s present weights; called before each rollout, by all processes at once."""
        ...

    def generate(
        self, model: PreTrainedModel | PeftModel, prompts: list[list[int]], seeds: list[int] | None = None
    ) -> list[Completion]:
        """Samples one completion for each prompt under `model`'s present weights.

        Args:
            model: The student, unwrapped. The engine leaves its weights, mode and generation config as they were.
            prompts: Token ids; a prompt that stands here several times gets independent completions.
            seeds: One for each prompt, from which alone its completion is sampled, so that it does not depend on the rest of
                the batch. None: from the global generators, which the trainer seeds for each rollout and process.

        Returns:
            As many completions, in order, each of at least one token.
        """
        ...
