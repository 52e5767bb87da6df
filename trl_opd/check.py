"""`trl-opd check`: student and teacher on a few prompts of the dataset, before a run that would take hours.

Takes the arguments of the run. Prints what each of the two reads and ends with, figures of a rollout, and in words what is
probably wrong: warnings, not walls. What cannot work at all is an error, as it is when training starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .arguments import Parser
from .batch import Rollout
from .checks import stop_token_ids
from .comparison import Comparison, compare
from .logprobs import top_tokens
from .models import eval_mode, load_tokenizer
from .prompts import PromptEncoder
from .scripts import load_data, make_trainer
from .teachers import InProcessTeacher, Teacher
from .teachers.routing import named_teachers, rows_by_teacher
from .trainer import OnPolicyDistillationTrainer

DESCRIPTION = (
    "Student and teacher on a few prompts of the dataset, before a run that would take hours. Takes the arguments of the run; "
    "prints what each of the two reads and ends with, figures of a rollout, and in words what is probably wrong."
)
TOP = 16
"""Likeliest tokens whose overlap is counted."""


@dataclass
class CheckArguments:
    """What `trl-opd check` takes beside the arguments of a run."""

    check_prompts: int = field(default=8, metadata={"help": "Prompts of the training data that are answered."})


@dataclass(frozen=True)
class Finding:
    """One teacher against the student."""

    name: str
    """Empty if there is one teacher only."""
    comparison: Comparison
    overlap: float | None
    """Mean share of the `TOP` likeliest tokens that both have in common; None if the teacher is a server."""
    prompts: list[tuple[str, str]]
    """(student's, teacher's) where they are not the same."""
    verdicts: list[str]


def main(argv: Sequence[str]) -> int:
    """Parses, checks, prints; returns 0 also where something looks wrong."""
    own, data, args, model = Parser([CheckArguments], "trl-opd check", DESCRIPTION).parse(argv)
    args.report_to, args.eval_strategy = [], "no"
    train, _ = load_data(data, args)
    trainer = make_trainer(args, model, train)
    print_findings(trainer, check(trainer, own.check_prompts))
    return 0


def check(trainer: OnPolicyDistillationTrainer, num_prompts: int = 8) -> list[Finding]:
    """Lets the student answer the first prompts of its training data and compares; trains nothing.

    Args:
        trainer: As for training. On several processes each checks its own prompts, and all must call this.
        num_prompts: Of this process.
    """
    wanted = num_prompts * trainer.args.num_generations
    rows = list(islice((row for batch in trainer.get_train_dataloader() for row in batch), wanted))
    rows = trainer.with_seeds(rows, trainer.train_shares, 0, 0, 0)
    with eval_mode(trainer.model):
        rollout, teacher_logps_BT, *_ = trainer.rollout_and_scores(rows, 0, 0)
        return [
            _finding(trainer, name, rollout[own_B], teacher_logps_BT[own_B])
            for name, own_B in rows_by_teacher(trainer.teacher, rollout).items()
            if own_B.any()
        ]


def _finding(trainer: OnPolicyDistillationTrainer, name: str, rollout: Rollout, teacher_logps_BT: Tensor) -> Finding:
    comparison = compare(rollout, teacher_logps_BT, trainer.vocab_size)
    verdicts = comparison.verdicts(trainer.args.max_completion_length, half_precision=trainer.half_precision())
    teacher = named_teachers(trainer.teacher)[name]
    prompts = _prompts(trainer, name, rollout)
    if prompts and rollout.teacher_prompts is None:
        verdicts.insert(
            0,
            "The teacher's own chat template renders these prompts otherwise than the student's, which it is given. If its "
            "first-token log-prob is low, let it have its own: teacher_chat_template.",
        )
    return Finding(name, comparison, top_overlap(trainer, teacher, rollout), prompts, verdicts)


def top_overlap(trainer: OnPolicyDistillationTrainer, teacher: Teacher, rollout: Rollout) -> float | None:
    """Mean share of the likeliest tokens that student and teacher have in common at action tokens; None for a server."""
    if not isinstance(teacher, InProcessTeacher):
        return None
    settings: dict[str, Any] = {"temperature": trainer.args.temperature, "vocab_size": trainer.vocab_size}
    k = min(TOP, trainer.vocab_size)
    theirs_BTK, _ = teacher.top(rollout, k)
    mine_BTK, _ = top_tokens(trainer.student(), rollout.ids_BT, rollout.attention_mask_BT, k, **settings)
    shared_BT = (mine_BTK[..., :, None] == theirs_BTK[..., None, :]).any(-1).float().mean(-1)
    return float(shared_BT[rollout.mask_BT].mean())


def _prompts(trainer: OnPolicyDistillationTrainer, name: str, rollout: Rollout) -> list[tuple[str, str]]:
    """Prompts as the two see them where the teacher has its own, or its template would render them otherwise."""
    tokenizer = trainer.processing_class
    starts = rollout.prompt_lengths_B.tolist()
    mine = [rollout.ids_BT[row, :start].tolist() for row, start in enumerate(starts)]
    theirs = rollout.teacher_prompts or _by_own_template(trainer, name, rollout)
    if theirs is None:
        return []
    pairs = [(cast(str, tokenizer.decode(a)), cast(str, tokenizer.decode(b))) for a, b in zip(mine, theirs, strict=True)]
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def _by_own_template(trainer: OnPolicyDistillationTrainer, name: str, rollout: Rollout) -> list[list[int]] | None:
    own = teacher_tokenizer(trainer, name)
    if own is None or not own.chat_template or any(isinstance(row["prompt"], str) for row in rollout.rows):
        return None
    encoder = PromptEncoder(own, trainer.prompt_encoder.chat_template_kwargs, trainer.prompt_encoder.max_length)
    return [encoder.truncate(encoder.encode(row)) for row in rollout.rows]


def teacher_tokenizer(trainer: OnPolicyDistillationTrainer, name: str) -> PreTrainedTokenizerBase | None:
    """The one saved with the teacher; None if it is the student's model, a server, or was made in memory."""
    source = trainer.teacher_name[name] if isinstance(trainer.teacher_name, dict) else trainer.teacher_name
    if source in ("", "base", "self") or source.startswith(("http://", "https://")):
        return None
    return load_tokenizer(source, trainer.args)


def print_findings(trainer: OnPolicyDistillationTrainer, findings: list[Finding], console: Console | None = None) -> None:
    """Prints tokens, prompts, figures and verdicts."""
    console = console or Console()
    console.print(_tokens(trainer, findings))
    for finding in findings:
        for mine, theirs in finding.prompts[:2]:
            table = Table("the student reads", "the teacher reads", title=f"prompts{_of(finding)} that differ")
            table.add_row(Text(mine), Text(theirs))
            console.print(table)
    console.print(_figures(findings))
    for finding in findings:
        for verdict in finding.verdicts:
            console.print(Text(f"! {f'Teacher {finding.name!r}: ' if finding.name else ''}{verdict}", style="yellow"))
    if not any(finding.verdicts for finding in findings):
        console.print(Text("Nothing looks wrong.", style="green"))


def _of(finding: Finding) -> str:
    return f" of {finding.name!r}" if finding.name else ""


def _tokens(trainer: OnPolicyDistillationTrainer, findings: list[Finding]) -> Table:
    table = Table("", "student", *(f"teacher{_of(finding)}" for finding in findings), title="tokens")
    tokenizers = [trainer.processing_class, *(teacher_tokenizer(trainer, finding.name) for finding in findings)]
    for attribute in ("bos_token", "eos_token", "pad_token"):
        values = [("the student's" if own is None else _named(own, attribute)) for own in tokenizers]
        table.add_row(attribute, *map(Text, values))
    stops = trainer.processing_class.convert_ids_to_tokens(stop_token_ids(trainer.student(), trainer.processing_class))
    table.add_row("ends with", Text(", ".join(stops)), *("" for _ in findings))
    return table


def _named(tokenizer: PreTrainedTokenizerBase, attribute: str) -> str:
    token = getattr(tokenizer, attribute)
    return "none" if token is None else f"{token} ({tokenizer.convert_tokens_to_ids(token)})"


def _figures(findings: list[Finding]) -> Table:
    table = Table("", *(finding.name or "value" for finding in findings), title="before the first update, nats a token")
    rows: dict[str, Any] = {
        "completions, tokens": lambda f: f"{f.comparison.completions}, {f.comparison.tokens}",
        "teacher KL": lambda f: f"{f.comparison.teacher_kl:.3f}",
        "teacher's log-prob": lambda f: f"{f.comparison.teacher_logp:.2f}",
        "log-ratio of first tokens": lambda f: f"{f.comparison.first_kl:.2f}",
        "log-ratio of stop tokens": lambda f: "none" if f.comparison.stop_kl is None else f"{f.comparison.stop_kl:.2f}",
        "log-ratio of the others": lambda f: f"{f.comparison.inner_kl:.2f}",
        f"top-{TOP} overlap": lambda f: "a server" if f.overlap is None else f"{f.overlap:.0%}",
        "cut at the limit": lambda f: f"{f.comparison.truncated_fraction:.0%}",
        "repeat themselves": lambda f: f"{f.comparison.repeated_fraction:.0%}",
        "|advantage| of 1% of the tokens": lambda f: f"{f.comparison.top1pct_share:.0%}",
    }
    for label, value in rows.items():
        table.add_row(label, *(value(finding) for finding in findings))
    return table
