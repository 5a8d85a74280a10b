"""A tile of a descheduled thread is taken over by another thread, and written once."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import quire_kernels.cpu.library

_SOURCES = Path(quire_kernels.cpu.library.__file__).with_name("csrc")


# Also as on systems without a fence for all threads of a process.
@pytest.mark.parametrize("definitions", [(), ("-DQUIRE_NO_MEMBARRIER",)], ids=["membarrier", "fences"])
def test_pieces_are_taken_over_and_written_once(definitions: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "thread_pool"
    source = Path(__file__).with_name("thread_pool.cpp")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ("-std=c++20", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*compiler, *flags, *definitions, "-I", _SOURCES, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
