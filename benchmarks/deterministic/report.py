"""What deterministic mode costs, as a table, from the result that was written."""

from typing import Any

from benchmarks.result_text import version
from benchmarks.tables import Cells

_COLUMNS = ("step", "off, ms", "on, ms", "cost")


def deterministic_table(result: dict[str, Any]) -> Cells:
    """A row for each case."""
    rows = [
        [case["what"], f"{case['off_ms']:.2f}", f"{case['on_ms']:.2f}", f"{case['cost']:+.1%}"]
        for case in result["cases"]
    ]
    return Cells(_COLUMNS, rows)


def deterministic_section(result: dict[str, Any]) -> str:
    """What docs/guarantees.md says of the mode."""
    machine = result["machine"]
    where = result["gpu"]["name"] if result["gpu"] else f"{machine['cores']} cores of {machine['processor']}"
    head = f"Median of {result['rounds']} steps each, in turns, {result['dtype']}; {version(result)}, {where}."
    return f"{head}\n\n{deterministic_table(result).markdown()}"
