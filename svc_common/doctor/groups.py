"""The groups of checks, and running each in processes of its own, so that a check that crashes or hangs ends no other.

Standard library only: this runs where Quire's packages are missing or broken.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import IO, Any

from svc_common.doctor.findings import Finding, Status
from svc_common.redaction import redact

ROLES = ("gateway", "scheduler", "worker")

MODULES: Mapping[str, str] = {
    "installation": "svc_common.doctor.installation",
    "make run": "svc_common.doctor.deployment",
    **{role: f"{role}_svc.doctor" for role in ROLES},
}
"""The module of each group, by name only: svc_common imports no role. Each has a CheckGroup `GROUP`."""

_MAX_OUTPUT = 2000  # bytes

PYTHON_OPTIONS = ("-B", "-P")
"""Writes no __pycache__, and imports nothing from the working directory."""

_START_SECONDS = 120.0
"""Time for the start of a process, and beyond the limit of a check, which the process itself reports."""


def installed_roles() -> tuple[str, ...]:
    """Roles whose packages are here: all of them, or the one of an image."""
    return tuple(role for role in ROLES if find_spec(f"{role}_svc") is not None)


def run_groups(
    names: Sequence[str], roles: Sequence[str], environment: Mapping[str, str], *, by_supervisor: bool
) -> Iterator[Finding]:
    """The findings of groups, which run at the same time, in the order of `names`."""
    options = [f"--roles={','.join(roles)}", *(["--by-supervisor"] if by_supervisor else [])]
    threads = ThreadPoolExecutor(max_workers=len(names))
    for each in [threads.submit(_run_group, name, options, environment) for name in names]:
        yield from each.result()


def _run_group(name: str, options: Sequence[str], environment: Mapping[str, str]) -> list[Finding]:
    command = [sys.executable, *PYTHON_OPTIONS, "-m", "svc_common.doctor.child", name, *options]
    return collect(name, command, environment)


def collect(name: str, command: Sequence[str], environment: Mapping[str, str]) -> list[Finding]:
    """The findings of a group that a command reports. After a crash, it runs again for the checks that are left."""
    findings: list[Finding] = []
    done: list[str] = []
    while True:
        crash = _run_child([*command, f"--done={json.dumps(done)}"], environment, findings, done)
        if crash is None:
            return findings
        check, why, output = crash
        found = f"{why}{f': {output}' if output else ''}"
        step = "report this with the output of `quire doctor --json`; the other checks are not affected"
        findings.append(Finding(Status.WRONG, found, "the check itself failed", step, name, check or "start"))
        if not check:
            return findings


def _run_child(
    command: Sequence[str], environment: Mapping[str, str], findings: list[Finding], done: list[str]
) -> tuple[str, str, str] | None:
    """Adds what a process reports, and the checks that it has begun. Returns None, or the check in which it ended
    early, why, and the end of its output.
    """
    started, limit = "", _START_SECONDS
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        lines = _lines_of(process.stdout)
        try:
            while True:
                message = _message(lines.get(timeout=limit))
                if message is None or "end" in message:
                    break
                if "finding" in message:
                    findings.append(Finding.from_json(message["finding"]))
                else:
                    started, limit = message["check"], message["seconds"] + _START_SECONDS
                    done.append(message["key"])
        except queue.Empty:
            message, why = None, f"it did not end within {limit:.0f} s"
            process.kill()
        else:
            why = ""
        status = process.wait()
        return None if message is not None else (started, why or _ending(status), _last_line(errors))


def _lines_of(stream: IO[bytes]) -> "queue.SimpleQueue[bytes]":
    """The lines of a stream as they come, then b""."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(b"")
        stream.close()

    threading.Thread(target=read, daemon=True).start()
    return lines


def _message(line: bytes) -> dict[str, Any] | None:
    """A message of the process; None at its end, and for half a line of one that crashed."""
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return message


def _ending(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit status {status}"


def _last_line(errors: IO[bytes]) -> str:
    """The end of it, without credentials."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _MAX_OUTPUT))
    text = errors.read().decode(errors="replace")
    if size > _MAX_OUTPUT:  # the first word may be a part of a URL, whose password could not be recognized
        text = "".join(text.split(maxsplit=1)[1:])
    lines = text.strip().splitlines()
    return redact(lines[-1]) if lines else ""
