"""The suites of other servers: their environments are pinned, and each test that is left out has a reason."""

import re

import pytest

from tests.peers.suites import SUITES, Suite


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_what_a_suite_needs_is_pinned(suite: Suite) -> None:
    assert re.fullmatch("[0-9a-f]{64}", suite.sha256)
    assert re.search("^pytest==", suite.requirements.read_text(), re.MULTILINE)
    assert any((suite.support / "files").rglob("*.py"))


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_test_is_left_out_by_one_reason(suite: Suite) -> None:
    patterns = suite.not_applicable()
    assert patterns
    assert all(patterns.values())
    assert suite.reason("tests/that/does_not_exist.py::test_it") is None
    for pattern, why in patterns.items():
        assert suite.reason(pattern.replace("*", "x")) == why
