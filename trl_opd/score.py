"""`trl-opd score`: log-probs of student and teacher for each token of given prompts and completions, as parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from . import checks
from .arguments import Parser
from .batch import Completion, Rollout, ScoredBatch
from .completions import completion_records
from .models import eval_mode
from .scripts import load_data, make_trainer
from .trainer import OnPolicyDistillationTrainer

CHUNK = 512
"""Completions, of like lengths, that are padded together; their forward passes are smaller."""
DESCRIPTION = (
    "Scores completions that are there already: for each token what student and teacher would have given it, under the same "
    "prompt, stop token, temperature and ids as in training. Takes the arguments of the run; --dataset_name is a file "
    "(.jsonl, .parquet, .csv) or dataset with the columns prompt and completion. A completion gets the stop token "
    "unless it ends with it, or a column `stopped` says that it was cut."
)


@dataclass
class ScoreArguments:
    """What `trl-opd score` takes beside the arguments of a run."""

    output: str = field(default="scores.parquet", metadata={"help": "File to write, a row for each completion."})


def main(argv: Sequence[str]) -> int:
    """Parses, scores, writes; returns 0."""
    own, data, args, model = Parser([ScoreArguments], "trl-opd score", DESCRIPTION).parse(argv)
    args.report_to, args.eval_strategy, args.output_dir = [], "no", str(Path(own.output).parent)
    rows, _ = load_data(data, args)
    records = score(make_trainer(args, model, None), list(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), own.output)
    mean = sum(sum(r["student_logps"]) - sum(r["teacher_logps"]) for r in records) / sum(len(r["ids"]) for r in records)
    print(f"{len(records)} completions are scored in {own.output}; student - teacher, mean of all tokens: {mean:.4f} nats.")
    return 0


def score(trainer: OnPolicyDistillationTrainer, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each row, in their order; trains nothing. For one process.

    Args:
        trainer: As for training.
        rows: Each has `prompt` and `completion`, texts or lists of messages, and may have `stopped`, and the columns that
            name teachers and their prompts.

    Returns:
        `prompt` and `completion` as the student reads them, `stopped`, `tokens` (texts), `ids`, `student_logps`,
        `teacher_logps` (nats, one a token) and `reverse_kl`: the mean of their difference, which estimates the reverse KL
        where the student wrote the completion.

    Raises:
        ValueError: If a row has no completion, or it does not fit into the student's context.
    """
    encoder, tokenizer = trainer.prompt_encoder, trainer.processing_class
    prompts = [encoder.truncate(encoder.encode(row)) for row in rows]
    completions = [encode_completion(row, tokenizer, trainer.stop_ids) for row in rows]
    lengths = [len(prompt) + len(completion.ids) for prompt, completion in zip(prompts, completions, strict=True)]
    context = checks.context_length(trainer.student())
    if context is not None and lengths and max(lengths) > context:
        number = lengths.index(max(lengths))
        raise ValueError(
            f"Row {number} has {max(lengths)} tokens, prompt and completion together, but the student reads at most "
            f"{context}. Shorten it, or leave it out."
        )
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    records: dict[int, dict[str, Any]] = {}
    for start in range(0, len(order), CHUNK):
        numbers = order[start : start + CHUNK]
        chunk = [prompts[i] for i in numbers], [completions[i] for i in numbers], [rows[i] for i in numbers]
        records |= zip(numbers, _scored(trainer, *chunk), strict=True)
    return [records[number] for number in range(len(rows))]


def encode_completion(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> Completion:
    """A row's completion as it would have been sampled, with the stop token that ended it."""
    text = row.get("completion")
    if isinstance(text, list) and len(text) == 1 and text[0].get("role") == "assistant":
        text = text[0].get("content")
    if not isinstance(text, str):
        raise ValueError(
            f"A completion must be a text or a list of one assistant message, got {row.get('completion')!r:.200}. Name the "
            "column that holds it `completion`."
        )
    ids = list(cast(Any, tokenizer(text, add_special_tokens=False)["input_ids"]))
    stopped = bool(ids) and ids[-1] in stop_ids
    if not stopped and row.get("stopped", True):
        own = tokenizer.eos_token_id
        ids, stopped = [*ids, own if own in stop_ids else stop_ids[0]], True
    if not ids:
        raise ValueError(f"The row {row!r:.200} has an empty completion that was cut: there is no token to score.")
    return Completion(ids=ids, logps=[0.0] * len(ids), stopped=stopped)


def _scored(
    trainer: OnPolicyDistillationTrainer, prompts: list[list[int]], completions: list[Completion], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    tokenizer = trainer.processing_class
    rollout = Rollout.build(
        prompts,
        completions,
        rows,
        pad_id=cast(int, tokenizer.pad_token_id),
        device=trainer.args.device,
        teacher_prompts=trainer.teacher_prompts.encode_rows(rows, prompts),
    )
    with eval_mode(trainer.model):
        rollout = rollout.with_sampled_logps(trainer.student_logps(rollout))
        teacher_logps_BT = trainer.score_with_teacher(rollout)
    checks.check_scores(rollout, teacher_logps_BT, None)
    nothing_BT = torch.zeros_like(teacher_logps_BT)
    batch = ScoredBatch.of(rollout, teacher_logps_BT, nothing_BT[:, 0], nothing_BT)
    records = []
    for record, ids in zip(completion_records(rollout, batch, tokenizer, 0), rollout.completion_ids(), strict=True):
        mine, theirs = record["sampled_logps"], record["teacher_logps"]
        kept = {name: record[name] for name in ("prompt", "completion", "stopped", "tokens")}
        scores = {"student_logps": mine, "teacher_logps": theirs, "reverse_kl": (sum(mine) - sum(theirs)) / len(ids)}
        records.append({**kept, "ids": ids, **scores})
    return records
