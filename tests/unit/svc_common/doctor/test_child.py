"""Running one check, and the checks of a role in each of its environments."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from svc_common.doctor.child import Reporter, run_check, run_group
from svc_common.doctor.findings import Check, CheckContext, Finding, Status, ok
from svc_common.settings import ServiceSettings


def test_what_a_check_found_before_it_raised_is_kept() -> None:
    def find(_: CheckContext) -> Iterator[Finding]:
        yield ok("first")
        raise OSError("the disk is gone")

    first, failed = run_check(Check("disk", find), CheckContext())
    assert first == ok("first")
    assert (failed.status, failed.found) == (Status.WRONG, "OSError: the disk is gone")


def test_a_check_that_hangs_is_left_behind() -> None:
    never = threading.Event()

    def find(_: CheckContext) -> Iterator[Finding]:
        never.wait()
        yield ok("")

    (finding,) = run_check(Check("disk", find, seconds=0.05), CheckContext())
    assert (finding.status, finding.problem) == (Status.WRONG, "the check did not end within 0.05 s")
    never.set()


def test_a_package_that_cannot_be_imported_is_wrong() -> None:
    def find(_: CheckContext) -> Iterator[Finding]:
        import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

        yield ok("")

    (finding,) = run_check(Check("device", find), CheckContext())
    assert (finding.status, finding.problem) == (Status.WRONG, "a package cannot be imported")
    assert "a_package_that_nobody_has" in finding.found


def test_credentials_in_urls_are_not_reported() -> None:
    messages: list[dict[str, Any]] = []
    Reporter("scheduler", [], messages.append).report("", "redis", ok("redis://:secret@host:6379 answers"))
    assert messages == [
        {"finding": {"status": "ok", "found": "redis://***@host:6379 answers", "role": "scheduler", "check": "redis"}}
    ]


def reported(name: str, *, by_supervisor: bool) -> list[tuple[str, str, str]]:
    """Role, check and status of the findings of a group."""
    messages: list[dict[str, Any]] = []
    reporter = Reporter(name, [], messages.append)
    run_group(name, (name,), reporter, by_supervisor=by_supervisor)
    findings = [message["finding"] for message in messages if "finding" in message]
    return [(each["role"], each["check"], each["status"]) for each in findings]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServiceSettings.model_fields:
        monkeypatch.delenv(f"QUIRE_{name.upper()}", raising=False)


@pytest.mark.usefixtures("no_settings")
def test_invalid_settings_are_named_and_the_other_checks_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SCHEDULER_PORT", "99999")
    monkeypatch.setenv("QUIRE_POLICY", "lottery")
    assert reported("scheduler", by_supervisor=False) == [
        ("scheduler", "settings", "wrong"),
        ("scheduler", "settings", "wrong"),
        ("scheduler", "settings", "skipped"),
    ]


@pytest.mark.usefixtures("no_settings")
def test_what_make_run_reports_already_is_not_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SCHEDULER_PORT", "99999")
    assert reported("scheduler", by_supervisor=True) == [("scheduler", "settings", "skipped")]


@pytest.mark.usefixtures("no_settings")
def test_under_make_run_a_role_has_no_checks_of_what_the_supervisor_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_RUN_DIR", str(tmp_path))
    assert reported("scheduler", by_supervisor=True) == [
        ("scheduler", "settings", "ok"),
        ("scheduler", "record keys", "ok"),
    ]
    assert list(tmp_path.iterdir()) == []
