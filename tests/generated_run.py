"""Records of a made-up run, as large as wanted, for tests of its report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from trl_opd.report.data import records_path

HOSTILE = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "\u2028\u2029<!--",
    "\ud800",
    "🙂👩‍🔬",
    "שלום عالم",
    "{{ 7*7 }}{% raw %}&amp;",
    "\x00\x07",
]


def sample(draw: random.Random, tokens: list[str], **more: Any) -> dict[str, Any]:
    """A completion with numbers of the usual sizes."""
    logps = [-draw.expovariate(1) for _ in tokens]
    scores = [min(-0.01, logp - draw.gauss(0.3, 1)) for logp in logps]
    return {
        "dataset": "train",
        "prompt": "Why is the sky blue? ",
        "stopped": True,
        "reward_advantage": 0.0,
        "tokens": tokens,
        "trained": [True] * len(tokens),
        "sampled_logps": [round(v, 3) for v in logps],
        "teacher_logps": [round(v, 3) for v in scores],
        "advantages": [round(q - s, 3) for s, q in zip(logps, scores, strict=True)],
        "length": len(tokens),
        "top": [[[draw.choice(tokens), round(-draw.expovariate(0.5), 3)] for _ in range(4)] for _ in tokens],
        **more,
    }


def make_records(steps: int, samples: int, tokens: int, texts: list[str] | None = None) -> list[dict[str, Any]]:
    """A run whose teacher KL falls."""
    draw = random.Random(0)
    words = texts or [f" w{i}" for i in range(8000)]
    records: list[dict[str, Any]] = [{"kind": "run", "facts": {"steps": str(steps)}}, {"kind": "begin", "step": 0}]
    for step in range(1, steps + 1):
        stop = {"completions": samples, "stopped": samples // 2, "student": -1.5, "teacher": -0.5}
        records.append({"kind": "rollout", "step": step, "position": [[0, 3 / step, 8], [1, 9 / step, 16]], "stop": stop})
        made = [sample(draw, texts or draw.choices(words, k=tokens)) for _ in range(samples)]
        records.append({"kind": "samples", "step": step, "samples": made})
        figures = {"loss": 1 / step, "teacher_kl": 2 / step, "time/rollout": 2.0, "time/train": 1.0, "entropy": 1.0}
        log = {"kind": "log", "step": step, "figures": figures, "memory": {"process": 2.0}, "seconds": 3.5}
        records.append({**log, "report_seconds": 0.01})
    return records


def write_run(run_dir: Path, records: list[dict[str, Any]]) -> Path:
    """Writes them as a run does."""
    records_path(run_dir).parent.mkdir(parents=True, exist_ok=True)
    records_path(run_dir).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir
