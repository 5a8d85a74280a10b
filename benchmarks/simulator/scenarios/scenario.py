"""An experiment: its measurement, its targets, and how its result is reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot import Chart
from benchmarks.record import RESULTS, ROOT
from benchmarks.report import Cells, Sense, origin, target_list


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound. `style` formats both."""

    what: str
    value: float
    sense: Sense
    bound: float
    style: str

    @property
    def holds(self) -> bool:
        return self.sense.holds(self.value, self.bound)

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        bound = f"target {self.sense.sign} {self.bound:{self.style}}"
        return {
            "what": self.what,
            "value": self.value,
            "holds": self.holds,
            "text": f"{self.what}: {self.value:{self.style}}, {bound}",
        }


@dataclass(frozen=True)
class Scenario:
    """An experiment. `measure` reports its progress and returns a result, which `table` and `charts` show."""

    name: str
    title: str
    measure: Callable[[Callable[[str], None]], dict[str, Any]]
    table: Callable[[dict[str, Any]], Cells]
    charts: Callable[[dict[str, Any]], Sequence[Chart]] | None = None

    @property
    def result_path(self) -> Path:
        return RESULTS / f"simulator_{self.name}.json"

    @property
    def plot_path(self) -> Path:
        return ROOT / "docs" / f"simulator_{self.name}.svg"

    def section(self, result: dict[str, Any]) -> str:
        """The experiment's section of docs/policies.md."""
        picture = "" if self.charts is None else f"\n\n![{self.title}]({self.plot_path.name})"
        return f"{origin(result)}.{picture}\n\n{self.table(result).markdown()}\n\n{target_list(result)}"


def outcome(rows: Sequence[dict[str, Any]], targets: Sequence[Target]) -> dict[str, Any]:
    """A result: a row for each case, and the targets."""
    return {"rows": list(rows), "targets": [target.to_json() for target in targets]}
