"""The library is built once for each set of inputs, and a failed build gives the reason."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_kernels.cpu import library
from quire_kernels.cpu.library import BuildFailed, load_library

_SOURCES = Path(library.__file__).with_name("csrc")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Sets a compiler that makes an empty library, since the whole takes a minute; returns how often it has run."""
    compiler, log = tmp_path / "c++", tmp_path / "log"
    empty = 'while [ $# -gt 1 ]; do shift; done; echo "$1" >>"$LOG"; exec c++ -shared -x c++ /dev/null -o "$1"'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *library.cpp*) {empty} ;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOG", str(log))
    return lambda: len(log.read_text().splitlines())


def test_a_library_is_built_once_and_reported(tmp_path: Path, compiled: Callable[[], int]) -> None:
    reported: list[str] = []
    for _ in range(2):
        assert isinstance(load_library(tmp_path / "kernels", reported.append), ctypes.CDLL)
    assert len(reported) == 1
    assert compiled() == 1
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_library_that_cannot_be_loaded_is_built_anew(tmp_path: Path, compiled: Callable[[], int]) -> None:
    load_library(tmp_path / "whole")
    [whole] = (tmp_path / "whole").iterdir()
    other = tmp_path / "other" / whole.name
    other.parent.mkdir()
    other.write_text("no library")
    assert isinstance(load_library(other.parent), ctypes.CDLL)
    assert other.stat().st_size == whole.stat().st_size
    assert compiled() == 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these processors are x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "sapphirerapids"])
def test_the_sources_are_valid_for_processors_that_are_not_here(processor: str) -> None:
    """Each has other parts of simd.h."""
    flags = ("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-march={processor}")
    subprocess.run(["c++", *flags, str(_SOURCES / "library.cpp")], check=True)


@pytest.mark.large
@pytest.mark.parametrize("header", sorted(_SOURCES.glob("*.h")), ids=lambda path: path.name)
def test_each_header_includes_what_it_uses(header: Path) -> None:
    flags = ("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-march=native")
    subprocess.run(["c++", *flags, "-include", str(header), "-x", "c++", os.devnull], check=True)


def test_a_compiler_that_is_missing_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(BuildFailed, match="nothing"):
        load_library(tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(BuildFailed, match="failed"):
        load_library(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(BuildFailed, match="install g"):
        load_library(tmp_path)
