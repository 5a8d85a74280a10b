"""C++ of tests, compiled for this processor and for each kind of x86-64, as far as this one has its instructions."""

import ctypes
import platform
import shlex
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

import quire_kernels.cpu.library
from quire_kernels.cpu.library import find_compiler

_SOURCES = Path(quire_kernels.cpu.library.__file__).with_name("csrc")
_FLAGS = "-std=c++20 -ffp-contract=off -fPIC -shared -pthread -Wno-psabi"
# What the compiler may use, and what the processor needs for it
_KINDS = {
    "this": ("-march=native", ()),
    "none": ("", ()),
    "AVX2": ("-mavx2 -mfma", ("avx2", "fma")),
    "AVX-VNNI": ("-mavx2 -mfma -mavxvnni", ("avx2", "fma", "avx_vnni")),
    "AVX-512": ("-mavx2 -mfma -mavx512f -mavx512bw", ("avx512f", "avx512bw")),
    "AVX-512 VNNI": ("-mavx2 -mfma -mavx512f -mavx512bw -mavx512vnni", ("avx512f", "avx512bw", "avx512_vnni")),
}
KINDS = tuple(_KINDS)


def compile_for(kind: str, source: Path, directory: Path, level: str = "-O2") -> ctypes.CDLL:
    """A library of a source for a kind of KINDS. Skips the test where this processor has not its instructions."""
    if kind != "this" and platform.machine() != "x86_64":
        pytest.skip("these instructions are x86-64's")
    flags, needed = _KINDS[kind]
    present = set(Path("/proc/cpuinfo").read_text().split())
    if missing := [name for name in needed if name not in present]:
        pytest.skip(f"needs a processor with {', '.join(missing)}")
    path = directory / f"{source.stem}.so"
    options = shlex.split(f"{_FLAGS} {level} {flags}")
    subprocess.run([*find_compiler(), *options, "-I", _SOURCES, source, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Of the elements of a contiguous tensor."""
    return ctypes.c_void_p(tensor.data_ptr())
