"""What became of the tests of a suite: the summary that is kept, and outcomes that a later run need not repeat."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.peers.suites import Suite
from tests.peers.support.outcome_log import FAILED, PASSED

Outcomes = Mapping[str, str]
"""By ids of tests: passed, failed, or why it was skipped."""


@dataclass(frozen=True)
class Applying:
    """The tests of a suite: those that apply, and how many do not, by ground and reason."""

    tests: tuple[str, ...]
    excluded: Mapping[str, int]
    """By ground."""

    @classmethod
    def of(cls, suite: Suite, found: Iterable[str]) -> "Applying":
        """Divides the tests that pytest finds."""
        tests, excluded = [], Counter[str]()
        for test in found:
            if (reason := suite.reason(test)) is None:
                tests.append(test)
            else:
                excluded[reason.ground.value] += 1
        return cls(tuple(tests), excluded)


def summary(
    suite: Suite, applying: Applying, outcomes: Outcomes, not_imported: Iterable[str], death: str | None
) -> dict[str, Any]:
    """The numbers of tests that passed, were skipped and do not apply, the names of others, and how pytest itself
    failed, if it did. A test is skipped where the server refuses a flag that it needs."""
    known = {test: outcomes[test] for test in applying.tests if test in outcomes}
    skipped: defaultdict[str, list[str]] = defaultdict(list)
    for test, outcome in known.items():
        if outcome not in (PASSED, FAILED):
            skipped[outcome].append(test)
    return {
        "version": suite.version,
        "passed": sum(outcome == PASSED for outcome in known.values()),
        "failed": sorted(test for test, outcome in known.items() if outcome == FAILED),
        "not_imported": sorted(not_imported),
        "skipped": {why: sorted(tests) for why, tests in sorted(skipped.items())},
        "not_run": len(applying.tests) - len(known),
        "excluded": dict(sorted(applying.excluded.items())),
        **({} if death is None else {"pytest": death}),
    }


def read_outcomes(path: Path) -> dict[str, str]:
    """The outcomes in a file that `outcome_log` wrote. A test that has failed in one of its phases has failed."""
    outcomes: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome = json.loads(line)
        if outcomes.get(test) != FAILED:
            outcomes[test] = outcome
    return outcomes


def kept_outcomes(path: Path, code: str | None) -> dict[str, str]:
    """The outcomes of earlier runs of the same code, but for those of tests that failed."""
    if code is None or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {test: why for test, why in kept["outcomes"].items() if why != FAILED} if kept["code"] == code else {}


def keep_outcomes(path: Path, code: str | None, outcomes: Outcomes) -> None:
    """Keeps them for later runs."""
    path.write_text(json.dumps({"code": code, "outcomes": outcomes}, indent=1))
