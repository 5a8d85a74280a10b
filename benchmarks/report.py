"""What every result is reported with: its provenance, its targets, and tables in Markdown and for the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Any

from benchmarks.record import DIRTY

_MANY = 3
"""So many targets that are alike share a line."""


class Sense(Enum):
    """Which side of its bound a figure must be on."""

    AT_LEAST = "at least"
    AT_MOST = "at most"
    BELOW = "below"

    @property
    def sign(self) -> str:
        return {Sense.AT_LEAST: "≥", Sense.AT_MOST: "≤", Sense.BELOW: "<"}[self]

    def holds(self, value: float, bound: float) -> bool:
        if self is Sense.AT_LEAST:
            return value >= bound
        return value <= bound if self is Sense.AT_MOST else value < bound


def target(
    what: str, value: float, sense: Sense, bound: float, interval: tuple[float, float] | None = None
) -> dict[str, Any]:
    """A figure and its bound, as a result holds them.

    With the `interval` that the figure is in with 95 % confidence, the bound holds if it holds for all of that.
    """
    found = {"what": what, "value": value, "sense": sense.value, "bound": bound}
    if interval is None:
        return {**found, "holds": sense.holds(value, bound)}
    ends = [sense.holds(end, bound) for end in interval]
    return {**found, "interval": list(interval), "holds": all(ends), "inconclusive": any(ends) and not all(ends)}


def target_lines(result: dict[str, Any]) -> list[str]:
    """A line of Markdown for each target of a result."""
    return [_target_line(one) for one in result.get("targets", ())]


def target_list(result: dict[str, Any]) -> str:
    """The targets of a result as a list in Markdown.

    Three or more that hold of the same figure and bound, such as those of different loads, share a line; what is missed
    is listed in any case. A figure is what stands behind the last colon of `what`.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in result.get("targets", ()):
        alike = (id(one),) if "text" in one else (one["what"].rpartition(": ")[2], one["sense"], one["bound"])
        groups.setdefault(alike, []).append(one)
    return "\n".join(f"- {line}" for group in groups.values() for line in _lines_of(group))


def _lines_of(group: list[dict[str, Any]]) -> Iterator[str]:
    """Targets of one figure and bound: one line of those that hold, if they are three or more; else a line of each."""
    holding = [one for one in group if one["holds"]]
    if len(holding) < _MANY:
        yield from map(_target_line, group)
        return
    values = [one["value"] for one in holding]
    cases, _, figure = zip(*(one["what"].rpartition(": ") for one in group), strict=True)
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*(case.split(", ") for case in cases), strict=False))
    case = ", ".join(part for part, *_ in alike)
    extent = f"{_number(min(values))} to {_number(max(values))}, {_bound_text(group[0])}"
    named = f"{case}: {figure[0]}" if case else figure[0]
    yield f"{named}, {len(holding)} of {len(group)} with this target: {extent}"
    yield from (_target_line(one) for one in group if not one["holds"])


def _target_line(one: dict[str, Any]) -> str:
    text = one.get("text") or _target_text(one)
    if one.get("inconclusive"):
        low, high = one["interval"]
        return f"**{text}: inconclusive, the 95 % interval is {low:.3g} to {high:.3g}**"
    return mark_missed(text, holds=one["holds"])


def mark_missed(text: str, *, holds: bool) -> str:
    """A target in Markdown; one that is missed in bold."""
    return text if holds else f"**{text}: missed**"


def version(result: dict[str, Any]) -> str:
    """The day and the measured commit, and whether the files differed from it; Markdown."""
    commit = result["commit"] or "unknown"
    dirty = " with uncommitted changes" if commit.endswith(DIRTY) else ""
    return f"{result['date'][:10]}, commit `{commit.removesuffix(DIRTY)[:12]}`{dirty}"


def origin(result: dict[str, Any]) -> str:
    """The version and the processor that was measured."""
    machine = result["machine"]
    return f"{version(result)}, {machine['cores']} cores of {machine['processor']}"


@dataclass(frozen=True)
class Cells:
    """A table. The first `num_labels` columns are words, the others figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1

    def markdown(self) -> str:
        """Without a line end behind it."""
        rule = ["---" if place < self.num_labels else "---:" for place in range(len(self.columns))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))

    def print(self, title: str) -> None:
        """Prints it to the terminal."""
        # Not at the top: `make gpu-check` runs where rich is not installed.
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="left" if place < self.num_labels else "right")
        for row in self.rows:
            table.add_row(*row)
        Console(width=150).print(table)


def _target_text(one: dict[str, Any]) -> str:
    return f"{one['what']}: {_number(one['value'])}, {_bound_text(one)}"


def _bound_text(one: dict[str, Any]) -> str:
    return f"target {Sense(one['sense']).sign} {one['bound']:,g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
