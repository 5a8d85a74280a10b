"""A tile of a descheduled thread is taken over by another thread, and written once."""

import os
import shlex
import subprocess
from pathlib import Path

import quire_kernels.cpu.library

_SOURCES = Path(quire_kernels.cpu.library.__file__).with_name("csrc")


def test_pieces_are_taken_over_and_written_once(tmp_path: Path) -> None:
    program = tmp_path / "thread_pool"
    source = Path(__file__).with_name("thread_pool.cpp")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ("-std=c++20", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*compiler, *flags, "-I", _SOURCES, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
