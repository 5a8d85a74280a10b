"""Groups of checks in processes that crash, hang or write nonsense."""

import os
import sys

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
        ("time.sleep(60)", "it did not end within 1 s: the reason"),
    ],
    ids=["signal", "exit", "half a line", "hangs"],
)
def test_a_check_that_ends_its_process_is_reported_and_the_others_run(
    action: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_START_SECONDS", 1.0 if "sleep" in action else 60.0)
    first, bad, last = collect(action)
    assert [each.check for each in (first, bad, last)] == ["first", "bad", "last"]
    assert (bad.status, bad.problem, bad.role) == (Status.WRONG, "the check itself failed", "r")
    assert why in bad.found
    assert first.status is last.status is Status.OK


def test_a_process_that_does_not_start_is_reported_once() -> None:
    (finding,) = groups.collect("r", [sys.executable, "-c", "raise SystemExit('no such thing')"], os.environ)
    assert (finding.status, finding.check) == (Status.WRONG, "start")
    assert "no such thing" in finding.found


def test_each_group_has_a_module() -> None:
    assert {name for name in groups.MODULES if name in groups.ROLES} == set(groups.ROLES)
