"""A rollout that servers write while the step before it trains (`rollout_lag`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .batch import Rollout

Written = tuple[Rollout, Tensor | None]
"""A rollout, and the teacher's log-probs of it where servers give them, too: (B, T) nats."""


@dataclass
class Draft:
    """The rows of a rollout to come and, once it has begun, the rollout itself."""

    batches: list[list[dict[str, Any]]]
    """Rows by micro-batch."""
    step: int
    """Optimizer steps before the first that trains on it."""
    sampled_at: int | None = None
    """Optimizer steps behind the weights that sample; None before it has begun."""
    _thread: threading.Thread | None = field(default=None, repr=False)
    _written: Written | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Those of all micro-batches."""
        return [row for batch in self.batches for row in batch]

    def begin(self, write: Callable[[], Written], sampled_at: int) -> None:
        """Has another thread call `write`, which must neither wait for other processes nor touch weights that are trained."""
        assert self._thread is None, "a rollout is begun once"

        def work() -> None:
            try:
                self._written = write()
            except BaseException as error:  # whatever it is belongs to the thread that waits for the rollout
                self._error = error

        self.sampled_at = sampled_at
        # a daemon: a run that ends by an error waits for requests that are under way only
        self._thread = threading.Thread(target=work, name="rollout", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is written, or failed."""
        if self._thread is not None:
            self._thread.join()

    def written(self) -> Written:
        """The rollout, once it is there.

        Raises:
            ServerError: As `write` did; so also any other error.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._written is not None, "it has not begun"
        return self._written
