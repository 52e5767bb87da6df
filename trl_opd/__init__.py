"""On-policy distillation for the Hugging Face stack: the student writes, the teacher scores every token it wrote."""

from .advantage import kl_advantages as kl_advantages
from .checks import DistillationWarning as DistillationWarning
from .config import OnPolicyDistillationConfig as OnPolicyDistillationConfig
from .logprobs import token_logps as token_logps
from .loss import policy_loss as policy_loss
from .trainer import OnPolicyDistillationTrainer as OnPolicyDistillationTrainer

__all__ = [
    "DistillationWarning",
    "OnPolicyDistillationConfig",
    "OnPolicyDistillationTrainer",
    "kl_advantages",
    "policy_loss",
    "token_logps",
]
__version__ = "0.1.0"
