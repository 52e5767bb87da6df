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
