"""Makes the tables of docs/benchmarks.md, and pictures, of what is in benchmarks/results: bench.json, learning.json.

python benchmarks/write_docs.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import heads
import learning_tables
import scaling
import steps
from arms import PHASES
from matplotlib.figure import Figure
from report import RESULTS, load

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MARKS = {
    name: (f"<!-- {name}: written by benchmarks/write_docs.py -->", f"<!-- end of {name} -->")
    for name in ("steps", "heads", "scaling", "learning")
}
SHOW: dict[str, Callable[[dict[str, Any]], str]] = {
    "steps": lambda found: "\n\n".join(steps.show(name, work) for name, work in sorted(found["works"].items())),
    "heads": heads.show,
    "scaling": scaling.show,
    "learning": learning_tables.show,
}


def where(machine: dict[str, Any]) -> str:
    """A line on when and where figures were measured."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['date']}; {machine['gpu'] or machine['cpu']}, {machine['threads']} of {machine['cpus']} CPUs; {versions}."
    )


def filled(text: str, part: str, found: dict[str, Any]) -> str:
    """The document with what stands between the marks of a part replaced."""
    begin, end = MARKS[part]
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{where(found['machine'])}\n\n{SHOW[part](found)}\n\n{end}{rest.split(end)[1]}"


def draw(works: dict[str, Any], path: Path) -> None:
    """Bars of each work's arms, cut into phases."""
    figure = Figure(figsize=(4 * len(works), 3.2), layout="constrained")
    places = figure.subplots(1, len(works), squeeze=False)[0]
    for axes, (name, work) in zip(places, sorted(works.items()), strict=True):
        arms = work["arms"]
        bottoms = [0.0] * len(arms)
        for phase in PHASES:
            heights = [median(own["phases"][phase]) for own in arms.values()]
            axes.bar(list(arms), heights, bottom=bottoms, label=phase)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_title(f"{name}: {work['tokens']} tokens")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right", fontsize="small")
    figure.supylabel("seconds of a step")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes all."""
    results, text, learned = load(), DOCS.read_text(), load(learning_tables.RESULTS)
    if learned:
        results["learning"] = learned
        learning_tables.draw(learned, learning_tables.RESULTS.with_suffix(".png"))
    for part in MARKS:
        if part in results:
            text = filled(text, part, results[part])
    DOCS.write_text(text)
    if "steps" in results:
        draw(results["steps"]["works"], RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
