"""Completions for people: printed with each token coloured by its advantage, and kept as parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .batch import Rollout, ScoredBatch
from .rows import Filler

FOLDER = "_completions"
"""Inside output_dir; the underscore keeps it out of what `push_to_hub` sends, prompts may be private."""


def completion_records(
    rollout: Rollout, batch: ScoredBatch, tokenizer: PreTrainedTokenizerBase, step: int
) -> list[dict[str, Any]]:
    """One record a completion: its prompt, text and, token by token, text, whether trained on, log-probs and advantage."""
    advantages, teacher_logps = batch.advantages_BT.tolist(), batch.teacher_logps_BT.tolist()
    sampled_logps, stopped = batch.sampled_logps_BT.tolist(), rollout.stopped_B.tolist()
    actions = rollout.mask_BT.tolist()
    starts = rollout.prompt_lengths_B.tolist()
    texts = TokenTexts(tokenizer, rollout.ids_BT[0, : starts[0]].tolist())
    records = []
    for row, ids in enumerate(rollout.completion_ids()):
        if isinstance(rollout.rows[row], Filler):
            continue
        span = slice(starts[row], starts[row] + len(ids))
        records.append(
            {
                "step": step,
                "dataset": str(rollout.rows[row].get("dataset", "train")),
                "prompt": tokenizer.decode(rollout.ids_BT[row, : starts[row]]),
                "completion": tokenizer.decode(ids),
                "stopped": stopped[row],
                "reward_advantage": float(batch.reward_advantages_B[row]),
                "tokens": [texts[token] for token in ids],
                "trained": actions[row][span],
                "sampled_logps": sampled_logps[row][span],
                "teacher_logps": teacher_logps[row][span],
                "advantages": advantages[row][span],
            }
        )
    return records


def write_completions(records: list[dict[str, Any]], output_dir: str) -> None:
    """Writes the records to `<output_dir>/_completions/step_<step>.parquet`."""
    path = Path(output_dir) / FOLDER / f"step_{records[0]['step']:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


def print_completions(records: list[dict[str, Any]], console: Console | None = None) -> None:
    """Prints the first completion of each dataset.

    Green: the teacher likes the token better than the student did; red: less. The stronger the colour, the greater |A|; tokens
    with a negative advantage are underlined too, so that the sign can be seen without colour. What is not trained on (a tool's
    output) is dim, as the prompt is.
    """
    console = console or Console()
    first = {record["dataset"]: record for record in reversed(records)}
    for name, record in reversed(first.items()):
        text = Text().append(record["prompt"], style="dim")
        largest = max((abs(a) for a in record["advantages"]), default=0.0) or 1.0
        for token, trained, advantage in zip(record["tokens"], record["trained"], record["advantages"], strict=True):
            text.append(token, style=_style(advantage / largest) if trained else "dim")
        if not record["stopped"]:
            text.append(" [cut]", style="yellow")
        title = f"step {record['step']} · {name} · green: teacher likes it better, red: less"
        console.print(Panel(text, title=Text(title), title_align="left"))


class TokenTexts(dict[int, str]):
    """The text of each token id, as it is inside a text: at its beginning, many tokenizers drop the space of a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        ordinary = [token for token in prompt if token not in set(tokenizer.all_special_ids)]
        self.before = (ordinary or prompt)[-1:]  # some token to stand before; that of a prompt is sure to exist
        self.start = len(cast(str, tokenizer.decode(self.before)))

    def __missing__(self, token: int) -> str:
        self[token] = cast(str, self.tokenizer.decode([*self.before, token]))[self.start :]
        return self[token]


def _style(strength: float) -> str:
    """A colour for an advantage relative to the row's greatest, in [-1, 1]."""
    level = int(55 + 200 * min(1.0, abs(strength)))
    if abs(strength) < 0.02:
        return ""
    return f"rgb(0,{level},0)" if strength > 0 else f"underline rgb({level},0,0)"
