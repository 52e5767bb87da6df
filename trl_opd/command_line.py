"""Command lines as text: the nearest known flag, the command that resumes a run, and the one a model card may show."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

PROGRAM = "trl-opd"
HIDDEN = "HIDDEN"
SECRET_FLAG = re.compile(r"(^|[_-])(token|key|secret|password|passwd)($|[_-])", re.IGNORECASE)
SECRETS = re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{8,}")
SECRET_ENTRY = re.compile(r"""(["']\w*(?:token|api_key|secret|password)["']\s*:\s*)(["']).*?\2""", re.IGNORECASE)
SERVER = re.compile(r"(https?://)(?!huggingface\.co/)[^\s\"',\]}#]+")
ABSOLUTE = re.compile(r"(?<![\w/:.*-])(?:~|/)[^\s\"',\]}]*")
NOTEBOOKS = ("", "-c", "-m", "ipykernel_launcher.py", "colab_kernel_launcher.py")


class UsageError(ValueError):
    """The command line itself is wrong: the exit status is 2."""


def unknown(name: str, known: Iterable[str], where: str = "") -> UsageError:
    """The error for a flag or key that is not known; names the one that is most like it."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    advice = f"Did you mean {near[0]}?" if near else "--help-all lists all."
    return UsageError(f"There is no {name}{where}. {advice}")


def check_flags(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raises UsageError for a flag that is not known."""
    known = list(known)
    for flag in (word.partition("=")[0] for word in argv if re.match(r"--\w", word)):
        if flag not in known:
            raise unknown(flag, known)


def read_config(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The file of `--config` and what it holds; both empty if there is none.

    Raises:
        UsageError: If it cannot be read, or is no mapping.
    """
    if "--config" not in argv:
        return "", {}
    place = list(argv).index("--config") + 1
    if place == len(argv):
        raise UsageError("--config needs the path of a YAML file.")
    path = argv[place]
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"The file of --config, {path}, cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds no settings; it must have lines such as `max_steps: 100`.")
    return path, settings


def take_flag(argv: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether a flag without a value is there, and the words without it. With a value it is another's flag, and stays."""
    words = list(argv)
    bare = [i for i, word in enumerate(words) if word == flag and (i + 1 == len(words) or words[i + 1].startswith("--"))]
    return bool(bare), [word for i, word in enumerate(words) if i not in bare]


def resuming(argv: Sequence[str], checkpoint: str) -> str:
    """The command that goes on from a checkpoint.

    Args:
        argv: As in `sys.argv`.
        checkpoint: A folder.
    """
    program, *words = _program(argv)
    kept, skip = [], False
    for word in words:
        if not skip and word.partition("=")[0] != "--resume_from_checkpoint":
            kept.append(word)
        skip = word == "--resume_from_checkpoint"
    return f"{program} {shlex.join([*kept, '--resume_from_checkpoint', checkpoint])}"


def shown(argv: Sequence[str]) -> str | None:
    """The command as others may read it: no secrets, no addresses of servers, of absolute paths the last part only.

    Settings from a file of `--config` stand in it as flags, so that it is whole without. None where there was no
    command, as in a notebook.
    """
    if not argv or Path(argv[0]).name in NOTEBOOKS:
        return None
    program, *words = _program(argv)
    words = _with_settings(words) if program == PROGRAM else words
    safe, hide = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        secret = bool(SECRET_FLAG.search(flag)) and flag.startswith("--")
        if hide and not word.startswith("--"):
            safe.append(HIDDEN)
        else:
            safe.append(f"{flag}={HIDDEN}" if secret and equals else _without_secrets(word))
        hide = secret and not equals
    return f"{program} {shlex.join(safe)}".rstrip()


def _program(argv: Sequence[str]) -> list[str]:
    """The words of a command, with the program as a user would call it."""
    script = Path(argv[0])
    if script.name == PROGRAM or script.parent.name == "trl_opd":
        command = [] if script.name in (PROGRAM, "cli.py", "__main__.py") else [script.stem]
        return [PROGRAM, *command, *argv[1:]]
    return [f"python {shlex.quote(_near(script))}", *argv[1:]]


def _with_settings(words: list[str]) -> list[str]:
    """The words with the settings of the file, which later flags win over, in place of the file; not its `env`."""
    path, settings = read_config(words)
    if not path:
        return words
    place = words.index("--config")
    flags = []
    for name, value in settings.items():
        if value is not None and name != "env":
            flags += [f"--{name}", *(map(str, value) if isinstance(value, list) else [_as_word(value)])]
    return [*words[:1], *flags, *words[1:place], *words[place + 2 :]]


def _as_word(value: Any) -> str:
    """A value of a file as it is written behind a flag."""
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def _near(script: Path) -> str:
    """Relative to where the program was started, or the name only."""
    here = Path.cwd()
    path = script if script.is_absolute() else here / script
    return str(path.relative_to(here)) if path.is_relative_to(here) else script.name


def _without_secrets(word: str) -> str:
    word = SECRET_ENTRY.sub(rf"\1\2{HIDDEN}\2", SECRETS.sub(HIDDEN, word))
    word = SERVER.sub(r"\1…", word)
    return ABSOLUTE.sub(lambda found: Path(found[0]).name, word)
