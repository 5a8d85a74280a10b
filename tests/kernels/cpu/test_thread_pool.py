"""A tile of a descheduled thread is taken over by another thread, and written once."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import compiled
import quire_kernels.cpu.library
from quire_kernels.cpu.amx import has_amx

_SOURCES = Path(quire_kernels.cpu.library.__file__).with_name("csrc")
# The compiler's own headers begin vectors with undefined values.
_OF_KERNELS = ("-march=native", "-ffp-contract=off", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized")


# Also as on systems without a fence for all threads of a process.
FENCES = pytest.mark.parametrize("definitions", [(), ("-DQUIRE_NO_MEMBARRIER",)], ids=["membarrier", "fences"])


@FENCES
def test_pieces_are_taken_over_and_written_once(definitions: tuple[str, ...], tmp_path: Path) -> None:
    _run("thread_pool.cpp", definitions, tmp_path)


@FENCES
def test_a_product_by_amx_goes_on_from_any_unit(definitions: tuple[str, ...], tmp_path: Path) -> None:
    if not has_amx(compiled.thread_pool()):
        pytest.skip("needs AMX")
    _run("amx_units.cpp", (*definitions, *_OF_KERNELS), tmp_path)


def test_attention_needs_no_memory_once_the_threads_run(tmp_path: Path) -> None:
    _run("attention_memory.cpp", _OF_KERNELS, tmp_path)


def _run(name: str, flags: tuple[str, ...], directory: Path) -> None:
    """Compiles a program of this folder, and runs it."""
    program, source = directory / "program", Path(__file__).with_name(name)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    common = ("-std=c++20", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*compiler, *common, *flags, "-I", _SOURCES, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
