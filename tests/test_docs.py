"""The code in the documents runs: each block builds a trainer, on tiny models under the names it uses, and trains a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .helpers import make_model, make_tokenizer, save_model
from .test_teachers import save_adapter

DOCS = Path(__file__).parents[1] / "docs"


# what is said of models that were never trained
@pytest.mark.filterwarnings("ignore:.*(guessing|were cut|repeat themselves)")
def test_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("student", "math-teacher")):
        model = make_model(seed, max_position_embeddings=1024)
        save_model(tmp_path / name, model, make_tokenizer(chat=True))
    save_adapter(Path("code-adapter"), "student", 5)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "teachers.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/teachers.md", "exec"), names)
        trainer = names.pop("trainer")
        trainer.args.max_steps = 1
        assert trainer.train().global_step == 1


@pytest.mark.filterwarnings("ignore::trl_opd.DistillationWarning")
@pytest.mark.parametrize("name", ["rollouts"])
def test_the_code_of_a_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS.parent / "examples"))
    text = (DOCS / f"{name}.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    path = tmp_path / f"{name}.py"
    path.write_text(code)  # tools' source is looked up
    exec(compile(code, str(path), "exec"), {"__name__": name})
