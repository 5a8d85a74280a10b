"""Writes what `make acceptance` found of the tests of other servers, and the tests that do not apply, into
docs/clients.md: `python -m docs.tools.peers`."""

from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, read_result
from docs.tools.sections import with_sections
from tests.peers.suites import SUITES, Ground, Suite

PAGE = Path(__file__).parents[1] / "clients.md"
RECORD = RESULTS / "acceptance.json"
_COMMAND = "`make acceptance PARTS=peers`"


def page(text: str) -> str:
    """The page with the results, and a table for each suite. Raises ValueError where it lacks a section."""
    record = (read_result(RECORD) or {}).get("peers")
    return with_sections(
        text,
        {
            "results of peers": f"Not run yet: {_COMMAND}.\n" if record is None else _results(record),
            "flags of peers": f"Not run yet: {_COMMAND}.\n" if record is None else _flags(record["summary"]),
            **{f"tests of {suite.name}": _table(suite) for suite in SUITES},
        },
    )


def _results(record: dict[str, Any]) -> str:
    head = ("suite", "version", "passed", "failed", "skipped", "not run", *(f"`{ground.value}`" for ground in Ground))
    rows = [head, ("---",) * len(head)]
    for suite in SUITES:
        if (found := record["summary"].get(suite.name)) is None:
            continue
        numbers = (
            found["passed"],
            len(found["failed"]) + len(found["not_imported"]),
            sum(map(len, found["skipped"].values())),
            found["not_run"],
            *(found["excluded"].get(ground.value, 0) for ground in Ground),
        )
        rows.append((f"`{suite.name}`", found["version"], *map(str, numbers)))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    day, commit = record["date"][:10], (record["commit"] or "unknown")[:12]
    resumed = "It does not repeat tests that have passed on code that differs in tests and pages only."
    return f"{table}\nBy {_COMMAND} of {day} on commit {commit}. {resumed}\n"


def _flags(summary: dict[str, Any]) -> str:
    rows = "".join(
        f"| {why.removeprefix('refused: quire serve: ')} | `{suite}` | {_names(tests)} |\n"
        for suite, found in summary.items()
        for why, tests in found["skipped"].items()
    )
    return f"| the server refuses | suite | tests |\n|---|---|---|\n{rows}"


def _names(tests: list[str]) -> str:
    """Tests without their parameters, in the folders of their files."""
    names = {"/".join(test.partition("[")[0].split("/")[-2:]) for test in tests}
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(suite: Suite) -> str:
    rows = (f"| `{one.ground.value}` | {one.why} | {', '.join(map(_pattern, one.tests))} |\n" for one in suite.reasons)
    return "| ground | it does not apply, since it | tests |\n|---|---|---|\n" + "".join(rows)


def _pattern(pattern: str) -> str:
    return f"`{pattern.removeprefix('*/').removeprefix('*::')}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
