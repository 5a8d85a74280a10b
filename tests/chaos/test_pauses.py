"""The limits of pauses are those that docs/guarantees.md states."""

import re
from itertools import islice
from pathlib import Path

from tests.chaos.fault_runner import Recovery
from tests.chaos.faults import Target, schedule
from tests.chaos.pauses import LIMITS, too_long

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
_ROW = re.compile(r"^\| ([a-z-]+) \| (\d+) \|$", re.MULTILINE)


def test_each_limit_is_documented() -> None:
    assert {name: float(seconds) for name, seconds in _ROW.findall(GUARANTEES.read_text())} == LIMITS
    assert LIMITS.keys() == set(Target)


def test_pauses_over_the_limit_are_reported() -> None:
    [fault] = islice(schedule(1), 1)
    limit = LIMITS[fault.target]
    assert too_long([(fault, Recovery(100.0, limit))]) == []
    assert too_long([(fault, Recovery(100.0, limit + 1))], factor=10) == []
    [message] = too_long([(fault, Recovery(100.0, limit + 1))])
    assert message == f"after fault 1 ({fault}), streams paused for {limit + 1:.1f} s; the limit is {limit:g} s"
