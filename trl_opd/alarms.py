"""Alarms: what a run's logged figures say is going wrong, with a reason and a remedy, each once.

What a rollout before the first update can tell (a teacher that is the student, or guesses; other templates; limits that are
too short from the start) is said by `comparison.py`, and not again here: an alarm is about a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .checks import warn

History = Sequence[Mapping[str, float]]
"""Figures of each log of training, oldest first."""

WINDOW = 5
"""Logs that are averaged, at the beginning and at the end: single steps scatter."""
CUT = 0.5
"""Share of completions cut at the limit above which most teach nothing about how to end."""
CUT_MORE = 0.2
"""By so much that share must have grown; a limit that was too short from the start has been said."""
STOPPING, STOPPED_NO_MORE = 0.2, 0.05
"""Share of completions that ended by themselves: a student that did, and one that no longer does."""
REPETITIVE, MORE_REPETITIVE = 4.0, 1.5
"""Bytes of text for one of zlib: prose has 1.5 to 3, long derivations and code up to 4; times the beginning's ratio."""
FEW_TOKENS, ENOUGH_TOKENS, FAR = 0.5, 1000, 0.1
"""Share of all |A| in a hundredth of the tokens; tokens a log needs for that to mean something; nats a token below which
student and teacher are so close that it is natural: few tokens are left that differ."""
WASTED, RATIO_OFF, SAMPLER_FAR = 0.5, 0.2, 0.1
"""Effective share of the sample below which more than half of it is wasted; distance of the mean ratio from 1; sampler_kl/v2
in nats, a hundredfold of what other precisions and engines were seen to make."""
COLLAPSED, LEAST_ENTROPY = 0.1, 0.1
"""Share of the beginning's entropy that is left; nats below which a student has nothing to choose."""


def course(history: History, name: str) -> tuple[float, float] | None:
    """Means of a figure over the first and the last `WINDOW` logs that have it; None if these are not apart yet."""
    values = [figures[name] for figures in history if name in figures]
    return (fmean(values[:WINDOW]), fmean(values[-WINDOW:])) if len(values) >= 2 * WINDOW else None


def more_is_cut(history: History) -> str | None:
    """Truncation over half, and growing."""
    cut = course(history, "completions/truncated_fraction")
    if cut is None or cut[1] <= CUT or cut[1] - cut[0] <= CUT_MORE:
        return None
    return (
        f"{cut[1]:.0%} of the completions are cut at the limit, {cut[0]:.0%} were at the beginning: the student writes longer "
        "and longer, and what is cut does not teach it to end. If the teacher's answers are that long, raise "
        "max_completion_length; if not, lower the learning rate, or leave cut completions out (mask_truncated_completions)."
    )


def no_stop(history: History) -> str | None:
    """The stop token vanishes."""
    stopped = course(history, "completions/stopped_fraction")
    if stopped is None or stopped[0] < STOPPING or stopped[1] >= STOPPED_NO_MORE:
        return None
    return (
        f"The student has unlearned to stop: {stopped[1]:.0%} of the completions end by themselves, {stopped[0]:.0%} did at "
        "the beginning. Most often the teacher ends with another token, or has another chat template: `trl-opd check` "
        "compares them; teacher_chat_template gives it its own."
    )


def repetition(history: History) -> str | None:
    """Completions repeat themselves."""
    ratio = course(history, "completions/compression_ratio")
    if ratio is None or ratio[1] < REPETITIVE or ratio[1] < MORE_REPETITIVE * ratio[0]:
        return None
    return (
        f"Completions repeat themselves: zlib makes them {ratio[1]:.1f} times shorter, {ratio[0]:.1f} times at the beginning. "
        "A teacher likes what it has read before, so that loops score well. Lower the learning rate, shorten "
        "max_completion_length, or go back to an earlier checkpoint."
    )


def few_tokens(history: History) -> str | None:
    """A few tokens carry most of all |A|."""
    share, kl, tokens = course(history, "advantage/top1pct_share"), course(history, "teacher_kl"), _tokens(history)
    if share is None or kl is None or tokens < ENOUGH_TOKENS or kl[1] < FAR or not share[0] < FEW_TOKENS <= share[1]:
        return None
    return (
        f"A hundredth of the tokens carries {share[1]:.0%} of all |advantages|, {share[0]:.0%} at the beginning: the rest is "
        "hardly heard. Look at these tokens with log_completions=True; kl_clip (10, say) bounds what each weighs."
    )


def off_policy(history: History) -> str | None:
    """Ratio or sampler KL beyond bounds."""
    found = {name: values[1] for name in ("ratio/ess", "ratio/mean", "sampler_kl/v2") if (values := course(history, name))}
    reasons = {
        "ratio/ess": found.get("ratio/ess", 1.0) < WASTED,
        "ratio/mean": abs(found.get("ratio/mean", 1.0) - 1) > RATIO_OFF,
        "sampler_kl/v2": found.get("sampler_kl/v2", 0.0) > SAMPLER_FAR,
    }
    names = [name for name, beyond in reasons.items() if beyond]
    if not names:
        return None
    values = ", ".join(f"{name} {found[name]:.2g}" for name in names)
    return (
        f"The policy that is trained is far from the one that sampled: {values}. Fewer "
        "num_substeps, rollout_lag=0 or a lower learning rate bring them together; with a server that samples, look whether "
        "it gets the weights."
    )


def entropy_collapse(history: History) -> str | None:
    """The student has nothing to choose any more, and is still far from the teacher."""
    entropy, kl = course(history, "entropy"), course(history, "teacher_kl")
    if entropy is None or kl is None or kl[1] < FAR:
        return None
    if entropy[1] >= LEAST_ENTROPY or entropy[1] >= COLLAPSED * entropy[0]:
        return None
    return (
        f"The student's entropy fell from {entropy[0]:.2g} to {entropy[1]:.2g} nats while teacher_kl is {kl[1]:.2g}: it "
        "writes the same again and again, and samples can no longer teach it anything else. Lower the learning rate, and go "
        "back to an earlier checkpoint."
    )


ALARMS: tuple[Callable[[History], str | None], ...] = (
    more_is_cut,
    no_stop,
    repetition,
    few_tokens,
    off_policy,
    entropy_collapse,
)


class AlarmCallback(TrainerCallback):
    """Warns, once each, of what `ALARMS` find in the logs of training. The trainer has it from the start."""

    def __init__(self) -> None:
        self.history: list[Mapping[str, float]] = []
        self.silent = list(ALARMS)
        """Those that have not gone off."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins with what was logged before a checkpoint."""
        self.silent = list(ALARMS)
        self.history = [entry for entry in state.log_history if "teacher_kl" in entry]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Looks at the figures so far."""
        if not state.is_world_process_zero or "teacher_kl" not in (logs or {}):
            return
        self.history.append(dict(logs or {}))
        found = {alarm: message for alarm in self.silent if (message := alarm(self.history)) is not None}
        self.silent = [alarm for alarm in self.silent if alarm not in found]
        for message in found.values():
            warn(f"Step {state.global_step}: {message}")


def _tokens(history: History) -> float:
    """Action tokens of one of the last logs, on average; `tokens` counts from the first step."""
    if len(history) <= WINDOW or "tokens" not in history[-1]:
        return 0.0
    return (history[-1]["tokens"] - history[-1 - WINDOW].get("tokens", 0.0)) / WINDOW
