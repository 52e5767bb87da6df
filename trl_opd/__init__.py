"""On-policy distillation for the Hugging Face stack: the student writes, the teacher scores every token it wrote."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantage import kl_advantages as kl_advantages
    from .batch import Completion as Completion
    from .batch import Rollout as Rollout
    from .batch import ScoredBatch as ScoredBatch
    from .callbacks import CompletionsCallback as CompletionsCallback
    from .callbacks import RolloutCallback as RolloutCallback
    from .checks import DistillationWarning as DistillationWarning
    from .config import OnPolicyDistillationConfig as OnPolicyDistillationConfig
    from .logprobs import token_logps as token_logps
    from .loss import policy_loss as policy_loss
    from .report.recorder import ReportCallback as ReportCallback
    from .trainer import OnPolicyDistillationTrainer as OnPolicyDistillationTrainer

__all__ = [
    "Completion",
    "CompletionsCallback",
    "DistillationWarning",
    "OnPolicyDistillationConfig",
    "OnPolicyDistillationTrainer",
    "ReportCallback",
    "Rollout",
    "RolloutCallback",
    "ScoredBatch",
    "kl_advantages",
    "policy_loss",
    "token_logps",
]
__version__ = "0.1.0"

_HOMES = {
    "Completion": "batch",
    "CompletionsCallback": "callbacks",
    "DistillationWarning": "checks",
    "OnPolicyDistillationConfig": "config",
    "OnPolicyDistillationTrainer": "trainer",
    "ReportCallback": "report.recorder",
    "Rollout": "batch",
    "RolloutCallback": "callbacks",
    "ScoredBatch": "batch",
    "kl_advantages": "advantage",
    "policy_loss": "loss",
    "token_logps": "logprobs",
}

if not TYPE_CHECKING:  # which would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first asked for: torch takes seconds, and `trl-opd --help` needs none of it."""
        if name not in _HOMES:
            raise AttributeError(f"module 'trl_opd' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
