"""`trl-opd`: programs beside the trainer."""

from __future__ import annotations

import sys

USAGE = """usage: trl-opd <command> [arguments]

commands:
  check   student and teacher compared on a few prompts, before training; takes the arguments of the run

`trl-opd <command> --help` lists a command's arguments."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "check":
        from . import check  # imports torch, which `--help` does not need

        return check.main(rest)
    print(USAGE)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
