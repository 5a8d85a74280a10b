"""llama.cpp's own programs, compiled on this machine from the sources that llama-cpp-python's distribution carries."""

import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from benchmarks.runner import log
from tests.clients.table import make_once

PROGRAMS = ("llama-server", "llama-perplexity", "llama-quantize")
_NAME = "bench-llama-cpp"
# For this processor, and without what the programs need for downloads and pages.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    # GCC 12 leaves out stores of the shapes of AMX's registers, since it does not know that they are read.
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",
    "-DBUILD_SHARED_LIBS=OFF",
    *(f"-DLLAMA_{part}=OFF" for part in ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI")),
)


def llama_cpp_programs() -> Path:
    """The folder of PROGRAMS, which are compiled on first use, in a quarter of an hour. Raises BenchmarkFailed."""
    folder = ROOT / "build" / "benchmarks" / "llama-cpp"
    requirements, sources = (ROOT / "requirements" / f"{_NAME}{part}.txt" for part in ("", "-sources"))
    try:
        make_once(folder, [requirements, sources], lambda: _compile(folder, requirements, sources))
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"llama.cpp could not be compiled: exit status {error.returncode}") from error
    return folder / "bin"


def _compile(folder: Path, requirements: Path, sources: Path) -> None:
    log("llama.cpp: compiling its server")
    _run(sys.executable, "-m", "venv", folder)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "install", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", requirements)
    with TemporaryDirectory(prefix="quire-bench-") as scratch:
        # Not its wheel: that has the library alone.
        options = ("--no-deps", "--no-binary", ":all:", "--require-hashes")
        _run(*pip, "download", *options, "--requirement", sources, "--dest", scratch)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        (root,) = Path(scratch).glob("*/vendor/llama.cpp")
        cmake, build = folder / "bin" / "cmake", Path(scratch, "build")
        ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"
        _run(cmake, "-S", root, "-B", build, "-G", "Ninja", ninja, *_OPTIONS)
        _run(cmake, "--build", build, "--target", *PROGRAMS)
        for program in PROGRAMS:
            (build / "bin" / program).rename(folder / "bin" / program)


def _run(*command: str | Path) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
