"""What users build on, frozen: names, signatures, settings and their defaults; and the shape of the package itself.

A change here is a change for users: it goes into CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import Trainer, TrainingArguments

import trl_opd
from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

PACKAGE = Path(trl_opd.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 330, 70

CONFIG_FIELDS: dict[str, Any] = {
    # of TrainingArguments, with another default
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "logging_steps": 1,
    "bf16": None,
    "activation_checkpointing": True,
    "eval_on_start": True,
    "remove_unused_columns": False,
    # models
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "teacher_model_name_or_path": None,
    "teacher_model_init_kwargs": None,
    "teacher_offload": False,
    "teacher_ema": None,
    "teacher_sync_steps": None,
    "vllm_server_timeout": 240.0,
    # prompts
    "max_prompt_length": None,
    "long_prompts": "truncate",
    "chat_template_kwargs": None,
    "teacher_chat_template": None,
    "teacher_system_prompt": None,
    "prompts_per_step": None,
    "stopping_strategy": "first_exhausted",
    # rollouts
    "num_generations": 1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "per_device_rollout_batch_size": None,
    "gather_for_generation": True,
    "rollout_engine": "transformers",
    "rollout_lag": 0,
    "vllm_server_base_url": None,
    "vllm_adapter_dir": None,
    "mask_truncated_completions": False,
    "max_tool_calling_iterations": None,
    # objective
    "kl_penalty_coef": 1.0,
    "kl_discount_factor": 0.0,
    "kl_clip": None,
    "kl_logps": "sampled",
    "kl_granularity": "sampled",
    "kl_top_k": 32,
    "kl_direction": "reverse",
    "beta": None,
    "loss_fn": "importance_sampling",
    "loss_fn_config": None,
    "loss_reduction": "token_mean",
    "num_substeps": 1,
    "compute_post_kl": False,
    # rewards
    "reward_weights": None,
    "scale_rewards": "none",
    # speed
    "max_tokens_per_micro_batch": None,
    # logging
    "log_completions": False,
    "report": True,
    "trace_steps": None,
}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    """Name, default ("required" if there is none) and whether it is keyword-only, of each parameter."""
    return [
        (p.name, "required" if p.default is p.empty else p.default, p.kind is p.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
    ]


def test_public_names() -> None:
    assert sorted(trl_opd.__all__) == [
        "Completion",
        "CompletionsCallback",
        "DistillationWarning",
        "OnPolicyDistillationConfig",
        "OnPolicyDistillationTrainer",
        "ReportCallback",
        "Rollout",
        "RolloutCallback",
        "ScoredBatch",
        "kl_advantages",
        "policy_loss",
        "token_logps",
    ]
    assert all(hasattr(trl_opd, name) for name in trl_opd.__all__)
    assert issubclass(trl_opd.DistillationWarning, UserWarning)
    assert issubclass(OnPolicyDistillationTrainer, Trainer)
    assert issubclass(OnPolicyDistillationConfig, TrainingArguments)


def test_kl_advantages() -> None:
    assert parameters(trl_opd.kl_advantages) == [
        ("sampled_logps", "required", False),
        ("teacher_logps", "required", False),
        ("mask", "required", False),
        ("coef", 1.0, True),
        ("discount", 0.0, True),
        ("clip", None, True),
        ("immediate", True, True),
    ]


def test_policy_loss() -> None:
    assert parameters(trl_opd.policy_loss) == [
        ("logps", "required", False),
        ("sampled_logps", "required", False),
        ("advantages", "required", False),
        ("mask", "required", False),
        ("loss_fn", "importance_sampling", True),
        ("loss_fn_config", None, True),
        ("reduction", "token_mean", True),
        ("num_items", None, True),
    ]


def test_token_logps() -> None:
    assert parameters(trl_opd.token_logps) == [
        ("model", "required", False),
        ("input_ids", "required", False),
        ("attention_mask", "required", False),
        ("temperature", 1.0, True),
        ("vocab_size", None, True),
        ("wanted_mask", None, True),
    ]


def test_trainer_constructor() -> None:
    assert parameters(OnPolicyDistillationTrainer.__init__)[1:] == [
        ("model", "required", False),
        ("teacher_model", None, False),
        ("args", None, False),
        ("train_dataset", None, False),
        ("eval_dataset", None, False),
        ("processing_class", None, False),
        ("callbacks", None, False),
        ("optimizers", (None, None), False),
        ("quantization_config", None, False),
        ("peft_config", None, False),
        ("tools", None, False),
        ("reward_funcs", None, False),
        ("evaluators", None, False),
        ("rollout_func", None, False),
    ]


def test_trainer_takes_what_trls_takes() -> None:
    """Same names, same order, same defaults up to tools, so that a user swaps the class."""
    theirs = parameters(trl.DistillationTrainer.__init__)  # type: ignore[reportPrivateImportUsage]
    ours = parameters(OnPolicyDistillationTrainer.__init__)
    shared = [parameter for parameter in theirs if parameter[0] in {name for name, *_ in ours}]
    assert [name for name, *_ in shared][-1] == "tools"
    assert ours[: len(shared)] == shared == theirs[: len(shared)]


def test_hooks_for_subclasses() -> None:
    hooks = {
        "generate_rollout": ["self", "rows"],
        "score_with_teacher": ["self", "rollout"],
        "compute_advantages": ["self", "student_logps_BT", "teacher_logps_BT", "mask_BT", "reward_advantages_B"],
        "compute_policy_loss": ["self", "logps_BT", "batch", "num_items"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    }
    found = {name: [p for p, *_ in parameters(getattr(OnPolicyDistillationTrainer, name))] for name in hooks}
    assert found == hooks


def test_config_fields_and_defaults() -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(OnPolicyDistillationConfig)}
    declared = [name for name in OnPolicyDistillationConfig.__annotations__ if name in defaults]
    assert {name: defaults[name] for name in declared} == CONFIG_FIELDS


def test_each_setting_has_a_help_text() -> None:
    fields = {f.name: f for f in dataclasses.fields(OnPolicyDistillationConfig)}
    assert all(len(fields[name].metadata["help"]) > 10 for name in CONFIG_FIELDS)


# ---- The package


def imports(path: Path) -> Iterator[str]:
    """Modules a file imports, ours as `.name` relative to the package."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            above = ".".join([*folder[: len(folder) + 1 - node.level], *(node.module or "").split(".")]).strip(".")
            yield f".{above}"
            yield from (f".{above}.{alias.name}".replace("..", ".") for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    tree = ast.walk(ast.parse(path.read_text()))
    yield from (node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("name", ["advantage.py", "loss.py"])
def test_the_algorithm_imports_torch_only(name: str) -> None:
    found = {module.split(".")[0] for module in imports(PACKAGE / name)}
    assert found - {"torch"} <= {"collections", "typing", "__future__", "dataclasses", "math"}


def test_nobody_imports_the_trainer_but_programs() -> None:
    importers = [path.relative_to(PACKAGE).as_posix() for path in FILES if ".trainer" in set(imports(path))]
    assert importers == ["__init__.py", "check.py", "score.py", "scripts.py"]


def test_nobody_imports_the_public_names() -> None:
    """`__init__.py` re-exports; the package itself imports from where things are."""
    public = {"trl_opd", *(f".{name}" for name in trl_opd.__all__)}
    assert [path.name for path in FILES if public & set(imports(path))] == []


def test_imports_form_no_cycle() -> None:
    modules = {
        "." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }
    graph = {
        name: {m for m in imports(path) if m in modules and m != name} for name, path in modules.items() if name != ".__init__"
    }
    # a package's __init__ re-exports its files, which may use what other files of the package define
    graph = {name: {m for m in found if not name.startswith(f"{m}.")} for name, found in graph.items()}
    while leaves := {name for name, found in graph.items() if not found & set(graph)}:
        graph = {name: found for name, found in graph.items() if name not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{path.name} has {lines} lines"
    for function in functions(path):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{path.name}: {function.name} has {length} lines"
        assert function.returns is not None, f"{path.name}: {function.name} says not what it returns"
