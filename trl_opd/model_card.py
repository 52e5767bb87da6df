"""The model card that goes to the Hub with a distilled student."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig

from .curves import series, sparkline
from .replica import is_url

OBJECTIVE = [
    "loss_fn",
    "loss_fn_config",
    "loss_reduction",
    "kl_penalty_coef",
    "kl_discount_factor",
    "kl_clip",
    "kl_logps",
    "kl_granularity",
    "kl_top_k",
    "kl_direction",
    "beta",
    "num_substeps",
    "prompts_per_step",
    "teacher_ema",
    "teacher_sync_steps",
    "num_generations",
    "max_completion_length",
    "temperature",
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "seed",
]

CITATION = """```bibtex
@misc{lu2025onpolicydistillation,
  title  = {On-Policy Distillation},
  author = {Kevin Lu and {Thinking Machines Lab}},
  year   = {2025},
  url    = {https://thinkingmachines.ai/blog/on-policy-distillation/}
}
```"""
BAR = r"\|"
LIBRARIES = ("trl", "transformers", "peft", "torch", "datasets")


@dataclass
class CardFacts:
    """What is known about a run when its card is written."""

    name: str
    """Of the repository the model can be loaded from."""
    student: str
    """Hub id or path; empty if it was made in memory."""
    teacher: str | dict[str, str]
    """So also the teacher, or several by name. It may be "base", the student's own, "self", the student, or a URL with the
    served name as its fragment."""
    objective: dict[str, Any]
    lora: PeftConfig | None
    datasets: list[str] = field(default_factory=list)
    num_prompts: int | dict[str, int] | None = None
    """Of several datasets by name; None for a stream."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """`trainer.state.log_history`."""
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    """More entries of the card's head, such as license and language."""
    command: str | None = None
    """That made it, as others may read it."""
    curves: str | None = None
    """Name of a picture beside the card."""


def model_card(facts: CardFacts) -> ModelCard:
    """A card that says what the model is, what it learned from, how it did, and how to load it."""
    base = _base(facts)
    data = ModelCardData(
        library_name="peft" if facts.lora else "transformers",
        pipeline_tag="text-generation",
        base_model=base if _is_hub_id(base) else None,
        datasets=[name for name in facts.datasets if _is_hub_id(name)] or None,
        tags=["on-policy-distillation", "trl-opd", "trl", *(["lora"] if facts.lora else []), *facts.tags],
        **facts.metadata,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {facts.name}",
        f"{_name(facts.student)}, distilled on-policy from {_teacher(facts.teacher)}: the student wrote completions, the "
        "teacher scored each of their tokens, and the negative per-token reverse KL was the advantage of a policy gradient. "
        "Trained with `trl_opd`.",
        "## How to load it\n\n" + (_loading_an_adapter(facts.name, base) if facts.lora else _loading_a_model(facts.name)),
        "## Training\n\n"
        + _table({"Student": _name(facts.student), "Teacher": _teacher(facts.teacher), "Data": _data(facts)})
        + "\n"
        + _rows(facts.objective),
        *(["## Adapter\n\n" + _table({}) + "\n" + _rows(_lora_rows(facts.lora))] if facts.lora else []),
        *(["## Figures\n\n" + figures] if (figures := _figures(facts.history)) else []),
        *([f"![Curves of the run]({facts.curves})"] if facts.curves else []),
        *([f"## Command\n\n```bash\n{facts.command}\n```"] if facts.command else []),
        "## Versions\n\n" + ", ".join(f"{library} {version(library)}" for library in LIBRARIES),
        "## Citation\n\n" + CITATION,
    ]
    return ModelCard("\n\n".join(sections) + "\n")


def _base(facts: CardFacts) -> str:
    """The model that must be there before this one can be loaded, or from which it came."""
    return facts.lora.base_model_name_or_path or "" if facts.lora else facts.student


def _loading_an_adapter(name: str, base: str) -> str:
    if _is_hub_id(base):
        return (
            "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
            f"The repository holds the adapter only; its base is {_name(base)}."
        )
    return (
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'base = AutoModelForCausalLM.from_pretrained("path/to/the/base")\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        f"The repository holds the adapter only. Its base is {_name(base)}, and must be at hand."
    )


def _loading_a_model(name: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )


def objective(args: Any) -> dict[str, object]:
    """What was optimised, of an `OnPolicyDistillationConfig`."""
    unused = {"sampled": ("kl_top_k", "kl_direction"), "full": ("kl_top_k",)}.get(args.kl_granularity, ())
    return {name: value for name in OBJECTIVE if name not in unused and (value := getattr(args, name)) is not None}


def _name(model: str) -> str:
    """How the text calls a model. Of a path only the folder's name: the rest is nobody else's business."""
    if not model:
        return "a model that was made in memory"
    if _is_hub_id(model):
        return f"[{model}](https://huggingface.co/{model})"
    return f"`{Path(model).name}` (a local folder)"


def _teacher(teacher: str | dict[str, str]) -> str:
    if isinstance(teacher, dict):
        return "several teachers (" + "; ".join(f"{name}: {_teacher(one)}" for name, one in teacher.items()) + ")"
    if is_url(teacher):  # where the server was is nobody else's business
        served = teacher.partition("#")[2]
        return f"{_name(served) if '/' in served and _is_hub_id(served) else f'`{Path(served).name}`'} (on a vLLM server)"
    return {"base": "its own base model (the adapter switched off)", "self": "itself"}.get(teacher) or _name(teacher)


def _data(facts: CardFacts) -> str:
    size = "a stream of prompts" if facts.num_prompts is None else f"{facts.num_prompts} prompts"
    if isinstance(facts.num_prompts, dict):
        parts = ", ".join(f"{name}: {number}" for name, number in facts.num_prompts.items())
        size = f"{sum(facts.num_prompts.values())} prompts ({parts})"
    return ", ".join([*(_dataset(name) for name in facts.datasets), size])


def _dataset(name: str) -> str:
    return f"[{name}](https://huggingface.co/datasets/{name})" if _is_hub_id(name) else f"`{Path(name).name}`"


def _lora_rows(config: PeftConfig) -> dict[str, Any]:
    names = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_dora", "use_rslora")
    values = config.to_dict()
    rows = {name: values[name] for name in names if values.get(name)}
    return {"kind": str(values["peft_type"]).rsplit(".", 1)[-1], **{k: _listed(v) for k, v in rows.items()}}


def _figures(history: list[dict[str, Any]]) -> str:
    """First and last value, and the course, of the training KL and reward and of everything evaluated."""
    names = dict.fromkeys(n for entry in history for n in entry if n in ("teacher_kl", "reward") or _is_evaluated(n))
    lines = ["| figure | first | last | course |", "|---|---|---|---|"]
    for name in names:
        if values := series(history, name):
            (first_step, first), (last_step, last) = values[0], values[-1]
            course = sparkline([value for _, value in values])
            lines.append(f"| {name} | {first:.4g} (step {first_step}) | {last:.4g} (step {last_step}) | {course} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval_") and not any(part in name for part in ("runtime", "per_second", "time/"))


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _rows(settings: dict[str, Any]) -> str:
    """Lines of a table, the values as code; a bar would end the cell."""
    values = {key: value.value if isinstance(value, Enum) else value for key, value in settings.items()}
    return "\n".join(f"| {key} | `{str(value).replace('|', BAR)}` |" for key, value in values.items())


def _listed(value: Any) -> Any:
    return ", ".join(sorted(value)) if isinstance(value, list | set | tuple) else value


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name) and not Path(name).exists()
