"""Programs under measurement: real processes that print, wait, fail and leave child processes."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkFailed, running


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_a_probe_finds_is_returned(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import os, time; open({str(mark)!r}, 'w').write(os.environ['MARK']); time.sleep(60)"
    with running("program", python(code), {"MARK": "ready"}) as process:
        assert process.wait_until(lambda: mark.read_text() or None if mark.exists() else None, 30) == "ready"
    assert process.popen.poll() is not None


def test_the_error_of_a_program_that_ends_has_its_last_lines() -> None:
    with (
        running("program", python("import sys; print('why it failed'); sys.exit(3)")) as process,
        pytest.raises(BenchmarkFailed, match=r"program ended with status 3:\nwhy it failed"),
    ):
        process.wait_until(lambda: None, 30)


def test_a_program_that_is_not_ready_in_time_is_given_up() -> None:
    with (
        running("program", python("import time; time.sleep(60)")) as process,
        pytest.raises(BenchmarkFailed, match="program was not ready in 0 s"),
    ):
        process.wait_until(lambda: None, 0.2)


def test_children_end_with_their_program(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with running("program", python(parent)) as process:
        child_id = int(process.wait_until(lambda: mark.read_text() or None if mark.exists() else None, 30))
        assert is_alive(child_id)
    deadline = time.monotonic() + 60
    while is_alive(child_id) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child_id)
    assert child_id != os.getpid()
