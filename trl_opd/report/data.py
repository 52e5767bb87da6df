"""Records of a run -> what its page shows. No torch.

A run appends to `_report/records.jsonl`; each line is one of
- run: {"kind", "facts": {label: text}}
- begin: {"kind", "step"}: training began, or was resumed, after so many steps; later records of an earlier try are void
- log: {"kind", "step", "figures": {name: number}, "memory": {...}, "seconds", "report_seconds"}
- rollout: {"kind", "step", "position": [[first place, sum of KL, tokens]...], "stop": {...}}
- samples: {"kind", "step", "samples": [...]}
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = "_report"
"""Inside output_dir; the underscore keeps it out of what `push_to_hub` sends, prompts may be private."""
PAGE = "report.html"
MAX_STEPS, MAX_TOKENS = 200, 160_000
"""Steps with samples, and tokens of samples, that a page holds; of more steps, evenly many are left out."""
MAX_POINTS = 600
"""Points of a curve."""

Record = dict[str, Any]


def records_path(run_dir: Path) -> Path:
    """Where a run's records are."""
    return run_dir / FOLDER / "records.jsonl"


def page_path(run_dir: Path, *, pushed: bool = False) -> Path:
    """Where its page is: in the private folder if the run is `pushed` to the Hub, or was."""
    private = run_dir / FOLDER / PAGE
    return private if pushed or private.is_file() else run_dir / PAGE


def set_aside(run_dir: Path) -> None:
    """Moves the page to where a push to the Hub does not take it along."""
    if (page := run_dir / PAGE).is_file():
        (run_dir / FOLDER).mkdir(exist_ok=True)
        page.replace(run_dir / FOLDER / PAGE)


def read_records(run_dir: Path) -> list[Record]:
    """What the run has recorded; of a run without a report, the figures of its newest `trainer_state.json`.

    Raises:
        ValueError: If there is neither.
    """
    path = records_path(run_dir)
    if path.is_file():
        return current([record for line in path.read_text().split("\n") if (record := _parsed(line)) is not None])
    states = [*run_dir.glob("trainer_state.json"), *run_dir.glob("checkpoint-*/trainer_state.json")]
    if not states:
        raise ValueError(
            f"'{run_dir}' holds no run: there is neither {FOLDER}/{path.name}, which a run with report=True writes, nor a "
            "trainer_state.json, which a checkpoint has. Pass the output_dir of a run."
        )
    history = json.loads(max(states, key=lambda state: state.stat().st_mtime).read_text())["log_history"]
    return [{"kind": "log", "step": entry["step"], "figures": entry} for entry in history]


def _parsed(line: str) -> Record | None:
    """None of an empty line, and of one that a crash cut short."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def current(records: Iterable[Record]) -> list[Record]:
    """Without what was recorded after the step at which the run was then resumed."""
    kept: list[Record] = []
    for record in records:
        if record["kind"] == "begin":
            kept = [before for before in kept if _is_before(before, record["step"])]
        kept.append(record)
    return kept


def _is_before(record: Record, begin: int) -> bool:
    # samples are numbered by the step they are for; a rollout whose first step is behind the checkpoint is not drawn anew
    return record["kind"] == "run" or record["step"] <= begin


def thinned(steps: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of them, evenly, the first and the last always among them."""
    if len(steps) <= most:
        return list(steps)
    if most == 1:
        return [steps[-1]]
    return [steps[i * (len(steps) - 1) // (most - 1)] for i in range(most)]


def page_data(records: Sequence[Record]) -> dict[str, Any]:
    """What the page shows."""
    facts = [record["facts"] for record in records if record["kind"] == "run"]
    logs = [record for record in records if record["kind"] == "log"]
    return {
        "facts": facts[-1] if facts else {},
        "curves": _curves(logs),
        "rollouts": thinned([_finite(r) for r in records if r["kind"] == "rollout"], MAX_POINTS),
        "samples": _samples([record for record in records if record["kind"] == "samples"]),
    }


def _curves(logs: Sequence[Record]) -> dict[str, list[list[float]]]:
    """Each figure's points, (step, value); figures of memory and time are among them."""
    curves: dict[str, list[list[float]]] = {}
    for log in logs:
        figures = {**log["figures"], **{f"memory/{name}": value for name, value in log.get("memory", {}).items()}}
        if "loss" in figures and "seconds" in log:
            figures |= {"seconds": log["seconds"], "time/report": log["report_seconds"]}
        for name, value in figures.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                curves.setdefault(name, []).append([log["step"], _rounded(value)])
    curves.pop("step", None)
    return {name: thinned(points, MAX_POINTS) for name, points in curves.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become the greatest numbers, and NaN nothing."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else max(-1e6, min(1e6, _rounded(value)))
    return value


def _samples(records: Sequence[Record]) -> dict[str, Any]:
    """Steps with their samples, in whole hundredths of a nat, each text once in `texts`."""
    total = sum(len(sample["tokens"]) for record in records for sample in record["samples"])
    most = min(MAX_STEPS, max(2, int(len(records) * MAX_TOKENS / total))) if total else MAX_STEPS
    texts: dict[str, int] = {}
    steps = [
        {"step": record["step"], "samples": [_packed(sample, texts) for sample in record["samples"]]}
        for record in thinned(records, most)
    ]
    return {"texts": list(texts), "steps": steps}


def _packed(sample: Record, texts: dict[str, int]) -> Record:
    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    return {
        **{name: sample[name] for name in ("dataset", "prompt", "stopped", "length")},
        "reward": _hundredths([sample["reward_advantage"]])[0],
        "tokens": [number(text) for text in sample["tokens"]],
        "trained": None if all(sample["trained"]) else [int(trained) for trained in sample["trained"]],
        "s": _hundredths(sample["sampled_logps"]),
        "q": _hundredths(sample["teacher_logps"]),
        "a": _hundredths(sample["advantages"]),
        # likeliest first, so that a flat list of ids and one of log-probs tell all
        "top": sample["top"] and [[number(text) for text, _ in top] for top in sample["top"]],
        "toplogps": sample["top"] and [_hundredths([logp for _, logp in top]) for top in sample["top"]],
    }


def _hundredths(values: Iterable[float | None]) -> list[int | None]:
    return [None if v is None or math.isnan(v) else round(100 * max(-1e4, min(1e4, v))) for v in values]


def packed(data: dict[str, Any]) -> str:
    """Gzip in base64 of it as JSON: nothing in it can mean anything in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")
