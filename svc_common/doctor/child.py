"""Runs the checks of one group, and writes a line of JSON for each check that begins and for each finding.

`svc_common.doctor.groups` starts this; the findings are those of a role with its environment.
"""

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, wrong
from svc_common.doctor.groups import MODULES
from svc_common.redaction import redact

Emit = Callable[[dict[str, Any]], None]
T = TypeVar("T")

_EXTRAS = {"installation": "local", "make run": "local"}
"""The extras of the package `quire` that groups need; a role needs the one of its name."""


def run_check(check: Check, context: CheckContext) -> list[Finding]:
    """The findings of a check. A check that raises, or does not end in time, is a finding."""
    findings: list[Finding] = []

    def find() -> None:
        for finding in check.find(context):
            findings.append(finding)  # noqa: PERF402  # those before an exception stay

    try:
        call_within(find, check.seconds)
    except ImportError as error:
        findings.append(_not_importable(error))
    except TimeoutError:
        problem = f"the check did not end within {check.seconds:g} s"
        findings.append(wrong("no result", problem, "see whether what it looks at hangs: a disk, a device, a network"))
    except Exception as error:
        findings.append(
            wrong(f"{type(error).__name__}: {error}", "the check itself failed", "report this; other checks go on")
        )
    return findings


def _not_importable(error: ImportError) -> Finding:
    step = "install it again, in the version that requirements/ or pyproject.toml names; see also `installation`"
    return wrong(f"{type(error).__name__}: {error}", "a package cannot be imported", step)


def call_within(function: Callable[[], T], seconds: float) -> T:
    """The result of a function in a thread, which is left behind after `seconds`. Raises TimeoutError."""
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # the function's own


class Reporter:
    """Writes messages about the checks of a group. Keys in `done` were begun by an earlier process."""

    def __init__(self, name: str, done: Sequence[str], emit: Emit) -> None:
        self._name, self._done, self._emit = name, frozenset(done), emit

    def run(self, case: str, check: Check, context: CheckContext) -> None:
        """Runs a check of a case of the group, such as one of several models, unless it was begun before."""
        key = f"{case}/{check.name}"
        if key in self._done:
            return
        self._emit({"check": check.name, "key": key, "seconds": check.seconds})
        for finding in run_check(check, context):
            self.report(case, check.name, finding)

    def report(self, case: str, check: str, finding: Finding) -> None:
        reported = Finding(
            finding.status,
            redact(finding.found),
            redact(finding.problem),
            redact(finding.next_step),
            role=case or self._name,
            check=check,
        )
        self._emit({"finding": reported.to_json()})


def run_group(name: str, roles: Sequence[str], reporter: Reporter, *, by_supervisor: bool) -> None:
    """Runs the checks of a group, for a role in each of its environments."""
    try:
        group: CheckGroup = import_module(MODULES[name]).GROUP
    except ImportError as error:
        extra = _EXTRAS.get(name, name)
        problem = f"the packages of `quire[{extra}]` are not complete"
        step = f"in the clone of Quire: pip install --editable '.[{extra}]'"
        reporter.report("", "start", wrong(str(error), problem, step))
        return
    if group.settings is None:
        context = CheckContext(roles=tuple(roles), by_supervisor=by_supervisor)
        for check in group.checks:
            reporter.run("", check, context)
        return
    inherited = dict(os.environ)
    try:
        _run_role(name, group, roles, reporter, by_supervisor=by_supervisor)
    finally:
        _set_environment(inherited)


def _run_role(name: str, group: CheckGroup, roles: Sequence[str], reporter: Reporter, *, by_supervisor: bool) -> None:
    from svc_common.doctor.role_cases import RoleCase, role_cases
    from svc_common.doctor.role_settings import read_role_settings

    inherited = dict(os.environ)
    for case in role_cases(name) if by_supervisor else [RoleCase(name)]:
        _set_environment(inherited | dict(case.environment))
        settings, findings = read_role_settings(group.settings, case.reported, case.environment.keys() - inherited)
        reporter.run(case.label, Check("settings", lambda _, found=findings: found), CheckContext())  # type: ignore[misc]
        if settings is not None:
            context = CheckContext(settings, tuple(roles), by_supervisor, case.num_processes)
            for check in group.checks:
                if check.name not in case.skipped:
                    reporter.run(case.label, check, context)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("--roles", required=True)
    parser.add_argument("--by-supervisor", action="store_true")
    parser.add_argument("--done", type=json.loads, default=[])
    options = parser.parse_args()
    # What packages print is not a message.
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=messages)

    reporter = Reporter(options.name, options.done, emit)
    try:
        run_group(options.name, options.roles.split(","), reporter, by_supervisor=options.by_supervisor)
    except ImportError as error:
        reporter.report("", "start", _not_importable(error))
    emit({"end": True})
    sys.stderr.flush()
    os._exit(0)  # threads of checks that hang are left behind


if __name__ == "__main__":
    main()
