"""The documents' code, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("ignore::trl_opd.DistillationWarning")
@pytest.mark.parametrize("name", ["rollouts"])
def test_the_code_of_a_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    text = (ROOT / f"docs/{name}.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    path = tmp_path / f"{name}.py"
    path.write_text(code)  # tools' source is looked up
    exec(compile(code, str(path), "exec"), {"__name__": name})
