"""What `trl-opd` commands that load models take: dataclasses, a parser for people, help with the most used first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from trl import ModelConfig, ScriptArguments, TrlParser

from .command_line import UsageError, check_flags, read_config, unknown
from .config import OnPolicyDistillationConfig

GROUPS = {
    "models and data": [
        "model_name_or_path",
        "teacher_model_name_or_path",
        "dataset_name",
        "dataset_train_split",
        "dataset_test_split",
        "output_dir",
    ],
    "adapter (leave out to train all weights)": ["use_peft", "lora_r", "lora_alpha", "lora_target_modules"],
    "one optimizer step": [
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_completion_length",
        "temperature",
        "learning_rate",
    ],
    "objective and rewards": ["kl_granularity", "loss_fn", "kl_discount_factor", "reward_funcs", "tools"],
    "length of the run": ["max_steps", "num_train_epochs", "resume_from_checkpoint", "save_steps", "seed"],
    "what is shown": ["eval_strategy", "eval_steps", "report_to", "log_completions", "push_to_hub", "hub_model_id"],
    "processes": ["accelerate_config", "num_processes", "use_cpu"],
}
"""What a newcomer needs, in the order in which it is thought of; the rest is behind `--help-all`."""


@dataclass
class LaunchArguments:
    """How the processes of a run are started; see docs/scaling.md."""

    accelerate_config: str | None = field(
        default=None,
        metadata={"help": "single (as if left out), ddp, fsdp2, fsdp2_offload, multi_node, or an accelerate file."},
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "Processes of all machines, one a GPU. More than one without a config: ddp."}
    )
    machine_rank: int | None = field(default=None, metadata={"help": "Number of this machine, 0 on the first."})
    main_process_ip: str | None = field(default=None, metadata={"help": "Address of the first machine."})
    main_process_port: int | None = field(default=None, metadata={"help": "A free port of the first machine."})


@dataclass
class TrainArguments:
    """What `trl-opd train` takes beside the settings of the trainer."""

    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions by dotted path, my_module.my_reward; this folder is searched too."}
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "Functions the student may call, by dotted path, my_module.my_tool."}
    )


class Parser(TrlParser):
    """TRL's parser (`--config run.yaml`, each field a flag) with errors of one line and help that can be read.

    Args:
        own: Dataclasses of the command itself; those of a run, of its data and model are added.
        prog: Name of the command.
        description: First lines of the help.
    """

    def __init__(self, own: Iterable[Any], prog: str, description: str) -> None:
        self.own = list(own)
        types: list[Any] = [*self.own, ScriptArguments, OnPolicyDistillationConfig, ModelConfig]
        super().__init__(types, prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.set_defaults(lora_dropout=0.0)  # dropout is off in training; so adapter_config.json says what was trained

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """The dataclasses, filled; `--help` and `--help-all` print and end the program.

        Raises:
            UsageError: If a flag or a key of the file is unknown, or a value cannot be read.
        """
        if {"-h", "--help", "--help-all"} & set(argv):
            print(self.full_help() if "--help-all" in argv else self.short_help())
            sys.exit(0)
        check_flags(argv, [*self._option_string_actions, "--config"])
        self._check_file(argv)
        try:
            return self.parse_args_and_config(args=list(argv))
        except UsageError:
            raise
        except ValueError as error:  # of the settings' own checks: they are of the command line
            raise UsageError(str(error)) from error

    def error(self, message: str) -> NoReturn:
        """In place of argparse's hundred lines of usage."""
        raise UsageError(message)

    def short_help(self) -> str:
        """The command's own options and the most used of the others."""
        listed = {name for names in GROUPS.values() for name in names}
        own = [action.dest for action in self._actions if action.dest in self._own_names() - listed]
        return self._help({"of this command": own, **GROUPS}) + (
            f"\nEach option may also stand in a YAML file: {self.prog} --config run.yaml (`name: value`; flags win).\n"
            "--help-all lists all options, --debug shows the traceback of an error.\n"
        )

    def full_help(self) -> str:
        """Every option."""
        listed = {name for names in GROUPS.values() for name in names}
        others = sorted(action.dest for action in self._actions if action.dest not in listed)
        return self._help({**GROUPS, "all others": others})

    def _own_names(self) -> set[str]:
        return {each.name for kind in self.own if kind is not LaunchArguments for each in fields(kind)}

    def _help(self, groups: dict[str, list[str]]) -> str:
        formatter = argparse.HelpFormatter(self.prog, max_help_position=40)
        formatter.add_text(f"usage: {self.prog} [--config run.yaml] [--option value ...]")
        formatter.add_text(self.description)
        actions = {action.dest: action for action in self._actions}
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(_as_shown(actions[name]) for name in names if name in actions)
            formatter.end_section()
        return formatter.format_help()

    def _check_file(self, argv: Sequence[str]) -> None:
        known = {action.dest for action in self._actions} | {"env"}
        path, settings = read_config(argv)
        for name in settings:
            if name not in known:
                raise unknown(str(name), known, f" in {path}")


def _as_shown(action: argparse.Action) -> argparse.Action:
    """The option once, however many spellings and negations the parser has for it, with a short name for its value."""
    switch = action.nargs == "?"
    shown = argparse.Action(action.option_strings[:1], action.dest, nargs=0 if switch else action.nargs)
    text = (action.help or "").replace("%(default)s", "").replace("%", "%%")
    default = action.default
    plain = default is not None and default is not argparse.SUPPRESS and not isinstance(default, bool) and default != ""
    shown.help = f"{text} (default: {str(default).replace('%', '%%')})" if plain and "default" not in text else text
    kind = getattr(action.type, "__name__", "")
    shown.metavar = kind if kind.isidentifier() else "value"
    return shown
