"""The page of a run, as text or as a file."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .data import packed, page_data, page_path, read_records

HERE = Path(__file__).parent


def render(run_dir: Path, version: str = "") -> str:
    """The page of what the run has recorded so far; with a `version` it asks its server for a newer one.

    Raises:
        ValueError: If there is no run.
    """
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("template.html.j2").render(
        name=run_dir.resolve().name,
        version=version,
        css=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup((HERE / "report.js").read_text(encoding="utf-8")),
        data=packed(page_data(read_records(run_dir))),
    )


def write_page(run_dir: Path, *, pushed: bool = False) -> Path:
    """Writes the page and says where; a reader never sees half of one."""
    path = page_path(run_dir, pushed=pushed)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.tmp"
    unfinished.write_text(render(run_dir), encoding="utf-8")
    os.replace(unfinished, path)
    return path
