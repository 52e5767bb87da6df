"""`trl-opd`: programs beside the trainer. Nothing here needs torch: each command imports what it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .command_line import unknown
from .program import run

HELP = """usage: trl-opd <command> [arguments]

On-policy distillation: the student writes, a teacher scores every token the student wrote.

commands:
  train    distil a teacher into a student, on one process or, with --accelerate_config, on several
  check    student and teacher compared on a few prompts, before training; takes the arguments of the run
  report   the page of a run (curves, and samples coloured by what the teacher thinks): trl-opd report RUN_DIR
  score    log-probs of student and teacher for each token of given prompts and completions, as parquet

`trl-opd <command> --help` lists a command's arguments, --debug shows the traceback of an error.

A first run:
  trl-opd train --model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-4B \\
      --dataset_name trl-lib/DeepMath-103K --use_peft --lora_target_modules all-linear --output_dir distilled

exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted (143: by SIGTERM)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if command in ("", "-h", "--help", "help"):
        print(HELP)
        return 0
    if command == "--version":
        from . import __version__

        print(f"trl-opd {__version__}")
        return 0
    commands = {"train": _train, "check": _check, "report": _report, "score": _score}
    return run(commands.get(command, lambda _: _no_command(command, commands)), rest, command)


def _train(argv: list[str]) -> int:
    from .launcher import launch, launch_options

    options = [] if {"-h", "--help", "--help-all"} & set(argv) else launch_options(argv)
    if options:
        return launch(options, "trl_opd.train", argv)
    from . import train

    return train.main(argv)


def _check(argv: list[str]) -> int:
    from . import check

    return check.main(argv)


def _report(argv: list[str]) -> int:
    from . import report

    return report.main(argv)


def _score(argv: list[str]) -> int:
    from . import score

    return score.main(argv)


def _no_command(command: str, known: dict[str, Any]) -> int:
    raise unknown(command, known, " command")


if __name__ == "__main__":
    sys.exit(main())
