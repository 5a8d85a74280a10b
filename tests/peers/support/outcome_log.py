"""A pytest plugin that appends the outcome of each test to a file: one line of JSON, [id, outcome].

The file is that which QUIRE_OUTCOMES names. What has run before the process was killed is in it.
Copied beside the tests of each suite.
"""

import json
import os
from pathlib import Path

import pytest

PASSED, FAILED = "passed", "failed"


def outcome_of(report: pytest.TestReport) -> str | None:
    """What a phase of a test says about it: passed, failed, or why it was skipped; None: nothing."""
    if report.failed:
        return FAILED
    if report.skipped:
        reason = getattr(report, "wasxfail", None) or report.longrepr
        return str(reason[2] if isinstance(reason, tuple) else reason).removeprefix("Skipped: ")
    return PASSED if report.when == "call" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (outcome := outcome_of(report)) is not None:
        with Path(os.environ["QUIRE_OUTCOMES"]).open("a") as file:
            file.write(json.dumps([report.nodeid, outcome]) + "\n")
