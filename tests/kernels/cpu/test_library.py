"""The library is built once for each set of inputs, and a failed build gives the reason."""

import ctypes
import os
from pathlib import Path

import pytest

from quire_kernels.cpu.library import BuildFailed, load_library


def test_a_library_is_built_once_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho "$@" >>"$0.log"\nexec c++ -O0 "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    reported: list[str] = []
    for _ in range(2):
        assert isinstance(load_library(tmp_path / "kernels", reported.append), ctypes.CDLL)
    assert len(reported) == 1
    assert (tmp_path / "c++.log").read_text().count("library.cpp") == 1
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_library_that_cannot_be_loaded_is_built_anew(tmp_path: Path) -> None:
    load_library(tmp_path / "whole")
    [whole] = (tmp_path / "whole").iterdir()
    other = tmp_path / "other" / whole.name
    other.parent.mkdir()
    other.write_text("no library")
    assert isinstance(load_library(other.parent), ctypes.CDLL)
    assert other.stat().st_size == whole.stat().st_size


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
