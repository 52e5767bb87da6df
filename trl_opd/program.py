"""What every command of `trl-opd` has around it: an error becomes one line for people, and an exit status."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .command_line import PROGRAM, UsageError, take_flag

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for what a process that failed has to say."""


def run(command: Callable[[list[str]], int], argv: Sequence[str], name: str) -> int:
    """Runs a command's function; what goes wrong becomes one line on stderr and an exit status."""
    debug, words = take_flag(argv, "--debug")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command(words)
    except KeyboardInterrupt:
        if ERROR_FILE not in os.environ:  # else the launcher says it
            print(f"{PROGRAM} {name}: interrupted; nothing more was saved", file=sys.stderr)
        return 128 + signal.SIGINT
    except UsageError as error:
        return _say(error, f"{PROGRAM} {name}: error: {error}", 2, debug)
    except Exception as error:  # the last one to see it: a person reads one line, --debug brings the rest
        return _say(error, f"{PROGRAM} {name}: error: {_in_words(error)}", 1, debug)


def _in_words(error: Exception) -> str:
    """The error's message on one line; where its class is not one that speaks to people, with the class."""
    text = " ".join(str(error).split())
    plain = isinstance(error, ValueError | OSError | ImportError) or type(error).__module__.startswith("trl_opd")
    return text if plain and text else f"{type(error).__name__}: {text} (--debug shows where)"


def _say(error: Exception, line: str, status: int, debug: bool) -> int:
    """Prints the line, or leaves it where the launcher of several processes finds it, who prints one; returns the status.

    The status is left there too: the process may be ended by its launcher, since another failed, before it can exit with it.
    """
    if debug:
        traceback.print_exception(error)
    if path := os.environ.get(ERROR_FILE):
        said = {"message": line, "status": status, "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(path, "w") as file:
            json.dump({"message": said}, file)
    else:
        print(line, file=sys.stderr)
    return status


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """Of our own warnings the text is for people; of others where they come from helps too."""
    ours = category.__name__ == "DistillationWarning"
    print(f"warning: {message}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}", file=sys.stderr)
