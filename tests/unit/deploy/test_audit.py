"""`make audit`: what it says of pip-audit's findings."""

import json

from requirements.audit import report


def test_a_vulnerability_is_named_with_the_version_that_has_none() -> None:
    flaw = {"id": "PYSEC-2026-1", "fix_versions": ["1.1"], "aliases": []}
    packages = [{"name": "one", "version": "1.0", "vulns": [flaw]}, {"name": "two", "version": "2.0", "vulns": []}]
    status, lines = report(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert status == 1
    assert lines == ["one 1.0: PYSEC-2026-1, fixed in 1.1", "audit: 2 packages looked up, 1 known vulnerabilities"]


def test_a_package_without_data_does_not_pass_as_sound() -> None:
    packages = [{"name": "one", "skip_reason": "not found"}, {"name": "two", "version": "2.0", "vulns": []}]
    status, lines = report(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert status == 2
    assert lines[-1] == "audit: the index has no data on vulnerabilities for 1 packages: one"


def test_an_index_that_cannot_be_reached_is_reported() -> None:
    status, lines = report("", "Traceback …\nConnectionError: no route")
    assert (status, lines) == (2, ["audit: no package could be looked up: ConnectionError: no route"])
