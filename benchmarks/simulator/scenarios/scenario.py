"""What every experiment is: something to measure, what is asked of it, and how it is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.plot import Chart
from benchmarks.record import RESULTS, ROOT
from benchmarks.result_text import mark_missed
from benchmarks.tables import Cells


class Sense(Enum):
    """Which side of its bound a figure is to be on."""

    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure, and what is asked of it. `style` formats both."""

    what: str
    value: float
    sense: Sense
    bound: float
    style: str

    @property
    def holds(self) -> bool:
        """Whether the figure is what was asked for."""
        return self.value >= self.bound if self.sense is Sense.AT_LEAST else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        asked = f"asked {self.sense.value} {self.bound:{self.style}}"
        return {
            "what": self.what,
            "value": self.value,
            "holds": self.holds,
            "text": f"{self.what}: {self.value:{self.style}}, {asked}",
        }


@dataclass(frozen=True)
class Scenario:
    """An experiment. `measure` says what it is at and returns its rows and targets; the others tell such a result."""

    name: str
    title: str
    measure: Callable[[Callable[[str], None]], dict[str, Any]]
    table: Callable[[dict[str, Any]], Cells]
    charts: Callable[[dict[str, Any]], Sequence[Chart]] | None = None

    @property
    def result_path(self) -> Path:
        """Where its result is kept."""
        return RESULTS / f"simulator_{self.name}.json"

    @property
    def plot_path(self) -> Path:
        """Where its charts are drawn."""
        return ROOT / "docs" / f"simulator_{self.name}.svg"


def outcome(rows: Sequence[dict[str, Any]], targets: Sequence[Target]) -> dict[str, Any]:
    """A result: a row for each case, and how it stands to what was asked."""
    return {"rows": list(rows), "targets": [target.to_json() for target in targets]}


def target_lines(result: dict[str, Any]) -> list[str]:
    """What was asked, and whether it holds; Markdown."""
    return [mark_missed(target["text"], holds=target["holds"]) for target in result["targets"]]
