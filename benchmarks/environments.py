"""The environments of the systems that Quire is compared with: packages from PyPI, pinned."""

import re
import subprocess
from pathlib import Path

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from tests.clients.table import install


def python_with(name: str) -> Path:
    """The Python of an environment with requirements/bench-NAME.txt, made on first use. Raises BenchmarkFailed."""
    folder, requirements = ROOT / "build" / "benchmarks" / name, ROOT / "requirements" / f"bench-{name}.txt"
    try:
        return install(folder, requirements)
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"{folder} could not be made: exit status {error.returncode}") from error


def version_of(name: str, package: str) -> str:
    """The version that requirements/bench-NAME.txt pins, or bench-NAME-sources.txt."""
    files = (ROOT / "requirements" / f"bench-{name}{part}.txt" for part in ("", "-sources"))
    pins = "".join(path.read_text() for path in files if path.exists())
    (version,) = re.findall(rf"^{re.escape(package)}==(\S+)", pins, re.MULTILINE)
    return str(version)
