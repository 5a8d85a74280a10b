"""Builds the C++ sources for this processor, once, and loads the library."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-ffp-contract=off"),
    *("-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"),
)


class BuildFailed(Exception):  # noqa: N818
    """The library cannot be built. The text names what to install."""


def load_library(directory: Path, report: Callable[[str], None] = lambda line: None) -> ctypes.CDLL:
    """Loads the library from `directory`, and builds it first where it is missing, which takes seconds.

    It is rebuilt for other sources, another compiler or another processor. Several processes may build at once.

    Raises:
        BuildFailed: there is no C++ compiler, or it failed.
    """
    compiler = find_compiler()
    path = library_path(directory, compiler)
    if path.exists():
        with suppress(OSError):  # rebuild, whatever the error is
            return ctypes.CDLL(str(path))
    report(f"compiling the processor's kernels with {' '.join(compiler)}")
    _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"the processor's kernels were compiled, and cannot be loaded: {error}") from error


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: CXX, or the first one on the PATH. Raises BuildFailed where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler = tuple(named) or ((found,) if found else ())
    if not compiler:
        raise BuildFailed("no C++ compiler is found: install g++ 12 or later, or name one in CXX")
    return compiler


def library_path(directory: Path, compiler: tuple[str, ...]) -> Path:
    """The file of the library that this compiler builds for this processor. Raises BuildFailed where it cannot run."""
    return directory / f"quire-{_key(compiler)}.so"


def check_sources(compiler: tuple[str, ...]) -> None:
    """Parses the sources, and writes no file. Raises BuildFailed where this compiler rejects them."""
    _run(*compiler, *_FLAGS, "-fsyntax-only", str(_SOURCES / "library.cpp"))


@functools.cache
def _key(compiler: tuple[str, ...]) -> str:
    """A digest of all that the library depends on."""
    digest = hashlib.sha256("\0".join((*compiler, *_FLAGS)).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    # The target of -march=native: machines with different processors may share the directory.
    digest.update(_run(*compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null").encode())
    return digest.hexdigest()[:16]


def _build(compiler: tuple[str, ...], path: Path) -> None:
    """Compiles beside the target and renames, so that the target is always complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
            built = Path(scratch) / path.name
            _run(*compiler, *_FLAGS, str(_SOURCES / "library.cpp"), "-o", str(built))
            built.rename(path)
    except OSError as error:
        raise BuildFailed(f"the processor's kernels cannot be kept in {path.parent}: {error}") from error


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"the C++ compiler {command[0]} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
