"""Writes what results/ holds into docs/performance.md, so that page and results cannot differ (`make bench-docs`).

    python -m benchmarks.docs

Each section of the page between `<!-- NAME: … -->` and `<!-- end of NAME -->` is written from its result; what stands
around them is not touched. The plot is drawn anew too.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import gpu_section
from benchmarks.kernels.report import kernels_section
from benchmarks.plot import draw
from benchmarks.quality.report import quality_section
from benchmarks.record import RESULTS, ROOT, read_result
from benchmarks.serving.report import serving_section, sweep_charts, sweep_section
from benchmarks.steps.report import steps_section

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "sweep.svg"


@dataclass(frozen=True)
class Section:
    """A part of the page that is written from a result, and the command that measures it."""

    name: str
    result: Path
    command: str
    render: Callable[[dict[str, Any]], str]

    def text(self) -> str:
        """What it says, by its result."""
        result = read_result(self.result)
        if result is None:
            return f"Not measured yet: `{self.command}`."
        return f"{self.render(result)}\n\nRepeat with `{self.command}`; all of it is in {_link(self.result)}."


SECTIONS = (
    Section("serving", RESULTS / "serving.json", "VLLM_VENV=ENVIRONMENT make bench", serving_section),
    Section("sweep", RESULTS / "sweep.json", "VLLM_VENV=ENVIRONMENT make bench-sweep", sweep_section),
    Section("steps", RESULTS / "steps.json", "make bench-steps", steps_section),
    Section("kernels", RESULTS / "kernels_cpu.json", "make bench-kernels", kernels_section),
    Section("quality", RESULTS / "quality.json", "make bench-quality", quality_section),
    Section("gpu", RESULTS / "gpu_check.json", "make gpu-check", gpu_section),
)


def rewritten(page: str, name: str, text: str) -> str:
    """The page with a section's text replaced. Raises ValueError where the page has no such section, or two."""
    marks = rf"(<!-- {re.escape(name)}: [^>]*-->\n)(.*?)(<!-- end of {re.escape(name)} -->)"
    new, count = re.subn(marks, lambda match: f"{match[1]}\n{text}\n\n{match[3]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} sections {name}")
    return new


def written(page: str) -> str:
    """The page with all sections as the results say."""
    for section in SECTIONS:
        page = rewritten(page, section.name, section.text())
    return page


def plot() -> str | None:
    """The plot of the sweep; None while there is none."""
    result = read_result(RESULTS / "sweep.json")
    return None if result is None else draw(sweep_charts(result))


def _link(path: Path) -> str:
    return f"[`{path.name}`](../{path.relative_to(ROOT)})"


def main() -> None:
    """Writes the page and the plot."""
    PAGE.write_text(written(PAGE.read_text()))
    if (drawn := plot()) is not None:
        PLOT.write_text(drawn)
    print(f"written to {PAGE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
