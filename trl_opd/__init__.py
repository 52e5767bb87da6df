"""On-policy distillation for the Hugging Face stack: the student writes, the teacher scores every token it wrote."""

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
