"""Writes the tables of tests that do not apply into docs/clients.md: `python -m docs.tools.peers`."""

from pathlib import Path

from docs.tools.sections import with_sections
from tests.peers.suites import SUITES, Suite

PAGE = Path(__file__).parents[1] / "clients.md"


def page(text: str) -> str:
    """The page with a table for each suite. Raises ValueError where it lacks the section of one."""
    return with_sections(text, {f"tests of {suite.name}": _table(suite) for suite in SUITES})


def _table(suite: Suite) -> str:
    by_reason: dict[str, list[str]] = {}
    for pattern, why in suite.not_applicable().items():
        by_reason.setdefault(why, []).append(f"`{pattern.removeprefix('*/').removeprefix('*::')}`")
    rows = (f"| {why} | {', '.join(patterns)} |\n" for why, patterns in by_reason.items())
    return "| it does not apply, since it | tests |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
