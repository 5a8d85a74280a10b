"""Groups of checks in processes that crash, hang or write nonsense."""

import os
import sys
from pathlib import Path

import pytest

from svc_common.doctor import groups
from svc_common.doctor.findings import Finding, Status

# Its checks: "first" and "last" are ok, and "bad" does what the first argument says.
PROGRAM = """
import json, os, sys, time
done = json.loads(sys.argv[-1].removeprefix("--done="))
def emit(**message):
    print(json.dumps(message), flush=True)
for check in ("first", "bad", "last"):
    if check in done:
        continue
    emit(check=check, key=check, seconds=0)
    if check == "bad":
        print("the reason", file=sys.stderr, flush=True)
        exec(sys.argv[1])
    emit(finding={"status": "ok", "found": "", "role": "r", "check": check})
emit(end=True)
"""


def collect(action: str) -> list[Finding]:
    return groups.collect("r", [sys.executable, "-c", PROGRAM, action], os.environ)


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV: the reason"),
        ("os._exit(3)", "its process ended with exit status 3: the reason"),
        ("print('{half', flush=True); os._exit(0)", "its process ended with exit status 0: the reason"),
        ("time.sleep(60)", "it did not end within 5 s: the reason"),
    ],
    ids=["signal", "exit", "half a line", "hangs"],
)
def test_a_check_that_ends_its_process_is_reported_and_the_others_run(
    action: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_START_SECONDS", 5.0 if "sleep" in action else 60.0)
    first, bad, last = collect(action)
    assert [each.check for each in (first, bad, last)] == ["first", "bad", "last"]
    assert (bad.status, bad.problem, bad.role) == (Status.WRONG, "the check itself failed", "r")
    assert why in bad.found
    assert first.status is last.status is Status.OK


def test_a_process_that_does_not_start_is_reported_once() -> None:
    (finding,) = groups.collect("r", [sys.executable, "-c", "raise SystemExit('no such thing')"], os.environ)
    assert (finding.status, finding.check) == (Status.WRONG, "start")
    assert "no such thing" in finding.found


@pytest.mark.parametrize("padding", ["", "-" * 1990, "- " * 990, "-" * 5000])
def test_credentials_in_the_output_of_a_process_are_not_reported(padding: str) -> None:
    """The end of the output begins anywhere, also within a URL."""
    program = f"raise SystemExit('cannot connect to redis://:secret@host:6379 {padding}')"
    (finding,) = groups.collect("r", [sys.executable, "-c", program], os.environ)
    assert "secret" not in finding.found
    assert padding or "cannot connect to redis://***@host:6379" in finding.found


def test_a_process_takes_no_modules_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "svc_common").mkdir()
    (tmp_path / "svc_common" / "__init__.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    findings = list(groups.run_groups(["installation"], ["gateway"], os.environ, by_supervisor=False))
    assert "python" in {each.check for each in findings}
    assert not any("working directory" in each.found for each in findings)
    assert not (tmp_path / "svc_common" / "__pycache__").exists()


def test_each_group_has_a_module() -> None:
    assert {name for name in groups.MODULES if name in groups.ROLES} == set(groups.ROLES)
