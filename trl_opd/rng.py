"""Random state: rollouts and evaluation draw from their own, so that they neither disturb training nor depend on it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import set_seed


@contextmanager
def forked_rng(*seed: int) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's generators start from `seed`; afterwards they are as they were before.

    Args:
        seed: Non-negative numbers, mixed so that (1, 2) and (2, 1) give unrelated streams. None given: the state is only kept.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        if seed:
            set_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
