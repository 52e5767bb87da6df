"""The callback that records a run for its report, and refreshes the page as the run goes on."""

from __future__ import annotations

import atexit
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from ..advantage import reverse_kl
from ..batch import Rollout, ScoredBatch
from ..callbacks import RolloutCallback
from ..completions import TokenTexts, completion_records
from ..teachers import InProcessTeacher
from ..teachers.routing import named_teachers, rows_by_teacher
from .data import page_path, records_path
from .page import write_page

SHARE = 0.01
"""Of a run's time, at most so much goes to samples, and so much to refreshing the page."""
MIN_SECONDS = 10.0
"""Between two refreshes."""
SAMPLES, MAX_TOKENS, TOP = 8, 512, 4
"""Completions kept of a rollout, tokens of each, and the teacher's likeliest tokens beside each of these."""


class ReportCallback(RolloutCallback):
    """Writes `output_dir/report.html` (`report`): curves, and samples with each token's log-probs and advantage.

    What it is made from is appended to `output_dir/_report`, so that a resumed run goes on with the same report. Where the run
    is pushed to the Hub the page lies there too, since prompts may be private. The first and the last rollout are sampled, and
    those between as often as a hundredth of the run's time allows.
    """

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._budget = _Budget()
        self._logged = self._refreshed = time.perf_counter()
        self._spent_at_log = self._refresh_took = 0.0
        self._pushed = False

    # ---- Events

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins a report, or goes on with it after a resume."""
        self.__init__()
        if not state.is_world_process_zero:
            return
        self._run_dir, self._pushed = Path(str(args.output_dir)), args.push_to_hub
        path = records_path(self._run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        if state.global_step == 0:
            path.unlink(missing_ok=True)
            page_path(self._run_dir).unlink(missing_ok=True)
        self._append({"kind": "run", "facts": {"steps": str(state.max_steps)}})
        self._append({"kind": "begin", "step": state.global_step})
        atexit.register(self._write)  # where an error or Ctrl-C ends the run, `on_train_end` is not called

    def on_rollout(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rollout: Rollout,
        batch: ScoredBatch,
        trainer: Any,
    ) -> None:
        """Keeps figures of the main process's rollout and, if it is time, samples of it."""
        with self._budget.spending():
            step = state.global_step + 1
            if self._run_dir is not None:
                real_B = rollout.real_B
                own = rollout[real_B], batch.teacher_logps_BT[real_B]
                self._append({"kind": "rollout", "step": step, "position": by_position(*own), "stop": stop_figures(*own)})
        last = step + trainer.args.num_substeps > state.max_steps
        wanted = [state.global_step == 0 or last or self._budget.allows()]
        if together := trainer.is_fsdp_enabled:  # what scores is sharded: all processes or none
            broadcast_object_list(wanted)
        if not wanted[0] or not (together or self._run_dir is not None):
            return
        with self._budget.spending():
            samples = make_samples(rollout, batch, trainer, step, together=together)
            if self._run_dir is not None and samples:
                self._append({"kind": "samples", "step": step, "samples": samples})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keeps the figures and refreshes the page, if that is due."""
        if self._run_dir is None or not logs:
            return
        record: dict[str, Any] = {"kind": "log", "step": state.global_step, "figures": logs, "memory": memory()}
        if "loss" in logs:
            now = time.perf_counter()
            record |= {"seconds": now - self._logged, "report_seconds": self._budget.spent - self._spent_at_log}
            self._logged, self._spent_at_log = now, self._budget.spent
        with self._budget.spending():
            self._append(record)
        if time.perf_counter() - self._refreshed > max(MIN_SECONDS, self._refresh_took / SHARE):
            self._write()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the page for the last time."""
        if self._run_dir is not None:
            atexit.unregister(self._write)
            self._write()

    # ---- Files

    def _append(self, record: dict[str, Any]) -> None:
        assert self._run_dir is not None
        with records_path(self._run_dir).open("a") as file:
            # the line's end comes first too: a crash may have cut the line before
            file.write("\n" * (record["kind"] == "run") + json.dumps(record, default=float) + "\n")

    def _write(self) -> None:
        if self._run_dir is None or not records_path(self._run_dir).is_file():
            return  # the folder was removed meanwhile
        start = time.perf_counter()
        write_page(self._run_dir, pushed=self._pushed)
        self._refreshed = time.perf_counter()
        self._refresh_took = self._refreshed - start


@dataclass
class _Budget:
    """What recording has cost."""

    spent: float = 0.0

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._last = self._start = 0.0

    def allows(self) -> bool:
        """Whether as much again as the last time would stay within `SHARE` of the time until now."""
        return self.spent + self._last <= SHARE * (time.perf_counter() - self._began)

    def spending(self) -> _Budget:
        """Counts the time inside."""
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._last = time.perf_counter() - self._start
        self.spent += self._last


def by_position(rollout: Rollout, teacher_logps_BT: Tensor) -> list[list[float]]:
    """Sum of s − q and tokens at places 0, 1, 2–3, 4–7, … of the completions: [first place, sum, tokens] each."""
    places_BT = torch.arange(rollout.ids_BT.shape[1], device=rollout.ids_BT.device) - rollout.prompt_lengths_B[:, None]
    kl_BT = reverse_kl(rollout.sampled_logps_BT, teacher_logps_BT, rollout.mask_BT)
    bins_N = (places_BT[rollout.mask_BT].float() + 1).log2().floor().long()
    sums = torch.zeros(2, 32, device=kl_BT.device)
    sums[0].index_add_(0, bins_N, kl_BT[rollout.mask_BT].float())
    sums[1].index_add_(0, bins_N, torch.ones_like(bins_N, dtype=torch.float32))
    totals, counts = sums.tolist()
    return [[2**i - 1, total, count] for i, (total, count) in enumerate(zip(totals, counts, strict=True)) if count]


def stop_figures(rollout: Rollout, teacher_logps_BT: Tensor) -> dict[str, float | None]:
    """How many completions stopped, and the mean log-prob of their stop tokens for student and teacher."""
    stopped_B = rollout.stopped_B & (rollout.completion_lengths_B > 0)
    ends_B = (rollout.prompt_lengths_B + rollout.completion_lengths_B - 1).clamp(min=0)
    rows_N, ends_N = stopped_B.nonzero().flatten(), ends_B[stopped_B]
    trained_N = rollout.mask_BT[rows_N, ends_N]
    rows_N, ends_N = rows_N[trained_N], ends_N[trained_N]
    mean = [float(logps_BT[rows_N, ends_N].mean()) for logps_BT in (rollout.sampled_logps_BT, teacher_logps_BT)]
    student, teacher = mean if len(rows_N) else (None, None)
    return {"completions": len(rollout), "stopped": int(rollout.stopped_B.sum()), "student": student, "teacher": teacher}


def make_samples(
    rollout: Rollout, batch: ScoredBatch, trainer: Any, step: int, *, together: bool = False
) -> list[dict[str, Any]]:
    """Up to `SAMPLES` records of completions, evenly among the rows, with the teacher's likeliest tokens at each place."""
    rows = rollout.real_B.nonzero().flatten().tolist() if not together else list(range(len(rollout)))
    if not rows:
        return []
    chosen = [rows[i * len(rows) // min(SAMPLES, len(rows))] for i in range(min(SAMPLES, len(rows)))]
    own_B = torch.zeros(len(rollout), dtype=torch.bool, device=rollout.ids_BT.device)
    own_B[chosen] = True
    some = rollout[own_B]
    scores = batch.teacher_logps_BT[own_B], batch.reward_advantages_B[own_B], batch.advantages_BT[own_B]
    top = teacher_top(some, trainer, together=together)
    real = some.real_B.tolist()
    records = completion_records(some, ScoredBatch.of(some, *scores), trainer.processing_class, step)
    tops = [None] * len(records) if top is None else [own for own, is_real in zip(top, real, strict=True) if is_real]
    return [_kept(record, own) for record, own in zip(records, tops, strict=True)]


def _kept(record: dict[str, Any], top: list[Any] | None) -> dict[str, Any]:
    kept = {name: record[name] for name in ("dataset", "prompt", "stopped", "reward_advantage")}
    lists = {name: record[name][:MAX_TOKENS] for name in ("tokens", "trained", "sampled_logps", "teacher_logps", "advantages")}
    # three digits: the file is for people
    lists |= {name: [round(v, 3) for v in lists[name]] for name in ("sampled_logps", "teacher_logps", "advantages")}
    return {**kept, **lists, "length": len(record["tokens"]), "top": None if top is None else top[:MAX_TOKENS]}


def teacher_top(rollout: Rollout, trainer: Any, *, together: bool) -> list[list[list[Any]]] | None:
    """For each completion and place, the teacher's likeliest tokens, [text, nats]; None if a teacher is a server."""
    teachers = named_teachers(trainer.teacher)
    if not all(isinstance(teacher, InProcessTeacher) for teacher in teachers.values()):
        return None
    if together and len(teachers) > 1:
        return None  # processes would ask different teachers, each of which waits for all processes
    k = min(TOP, trainer.vocab_size)
    texts = TokenTexts(trainer.processing_class, rollout.ids_BT[0, : int(rollout.prompt_lengths_B[0])].tolist())
    found: list[list[list[Any]]] = [[] for _ in range(len(rollout))]
    with torch.no_grad():
        for name, own_B in rows_by_teacher(trainer.teacher, rollout).items():
            if not own_B.any():
                continue
            own = rollout[own_B]
            ids_BTK, logps_BTK = (part.tolist() for part in teachers[name].top(own, k))  # pyright: ignore
            numbers = own_B.nonzero().flatten().tolist()
            for row, number in enumerate(numbers):
                start, length = int(own.prompt_lengths_B[row]), int(own.completion_lengths_B[row])
                found[number] = [
                    [[texts[i], round(logp, 3)] for i, logp in zip(ids_BTK[row][t], logps_BTK[row][t], strict=True)]
                    for t in range(start, start + length)
                ]
    return found


def memory() -> dict[str, float]:
    """GB that this process holds, and the most that it has held of a GPU."""
    held = {"process": psutil.Process().memory_info().rss / 1e9}
    return held | ({"GPU peak": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {})
