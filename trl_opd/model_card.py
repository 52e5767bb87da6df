"""The model card that goes to the Hub with a distilled student."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig

CITATION = """```bibtex
@misc{lu2025onpolicydistillation,
  title  = {On-Policy Distillation},
  author = {Kevin Lu and {Thinking Machines Lab}},
  year   = {2025},
  url    = {https://thinkingmachines.ai/blog/on-policy-distillation/}
}
```"""


@dataclass
class CardFacts:
    """What is known about a run when its card is written."""

    name: str
    student: str
    teacher: str
    objective: dict[str, Any]
    lora: PeftConfig | None
    datasets: list[str] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    """`trainer.state.log_history`."""
    versions: dict[str, str] = field(default_factory=dict)


def model_card(facts: CardFacts) -> ModelCard:
    """A card that says what the model is, what it learned from, how it did, and how to load it."""
    data = ModelCardData(
        library_name="peft" if facts.lora else "transformers",
        pipeline_tag="text-generation",
        base_model=facts.student if _is_hub_id(facts.student) else None,
        datasets=[name for name in facts.datasets if _is_hub_id(name)] or None,
        tags=["on-policy-distillation", "trl-opd", "trl", *(["lora"] if facts.lora else [])],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {facts.name}",
        f"{_code(facts.student)}, distilled on-policy from {_code(facts.teacher)}: the student wrote completions, the teacher scored "
        "each of their tokens, and the negative per-token reverse KL was the advantage of a policy gradient. Trained with "
        "`trl_opd`.",
        "## How to load it\n\n" + _loading_code(facts),
        "## Training\n\n" + _table({"Student": facts.student, "Teacher": facts.teacher, **_data(facts), **facts.objective}),
        *(["## Adapter\n\n" + _table(_lora_rows(facts.lora))] if facts.lora else []),
        *(["## Figures\n\n" + figures] if (figures := _figures(facts.history)) else []),
        "## Versions\n\n" + _table(facts.versions),
        "## Citation\n\n" + CITATION,
    ]
    return ModelCard("\n\n".join(sections) + "\n")


def _loading_code(facts: CardFacts) -> str:
    if facts.lora:
        return (
            "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{facts.name}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")\n```\n\n'
            f"The repository holds the adapter only; its base is {_code(facts.student)}."
        )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{facts.name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")\n```'
    )


def _data(facts: CardFacts) -> dict[str, str]:
    return {"Data": ", ".join(facts.datasets)} if facts.datasets else {}


def _lora_rows(config: PeftConfig) -> dict[str, Any]:
    names = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_dora", "use_rslora")
    values = config.to_dict()
    rows = {name: values[name] for name in names if values.get(name)}
    return {"Kind": str(values["peft_type"]).rsplit(".", 1)[-1], **{k: _listed(v) for k, v in rows.items()}}


def _figures(history: list[dict[str, float]]) -> str:
    """First and last value of the training KL and of everything evaluated."""
    names = dict.fromkeys(n for entry in history for n in entry if n == "teacher_kl" or _is_evaluated(n))
    lines = ["| figure | first | last |", "|---|---|---|"]
    for name in names:
        values = [(entry["step"], entry[name]) for entry in history if name in entry]
        (first_step, first), (last_step, last) = values[0], values[-1]
        lines.append(f"| {name} | {first:.4g} (step {first_step}) | {last:.4g} (step {last_step}) |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval_") and not any(part in name for part in ("runtime", "per_second", "time/"))


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_code(value)} |" for key, value in rows.items())])


def _listed(value: Any) -> Any:
    return ", ".join(sorted(value)) if isinstance(value, list | set | tuple) else value


def _code(value: Any) -> str:
    return f"`{value}`"


def _is_hub_id(name: str) -> bool:
    return bool(name) and name.count("/") <= 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))
