"""Programs that tests need and Python packages do not contain."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

_PACKAGES = Path(__file__).parents[2] / ".ci" / "apt.txt"


def tool(name: str) -> str:
    """The path of a program. If it is not installed, the test is skipped; in CI, which installs it, the test fails."""
    path = shutil.which(name)
    if path is None:
        missing(f"there is no {name} on the PATH (CI: it belongs in .ci/apt.txt)")
    return path


def missing(what: str) -> NoReturn:
    """Skips the test; in CI, where nothing may be missing, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def optional_tool(name: str, package: str) -> str:
    """The path of a program that CI installs if .ci/apt.txt names its Debian package. Where it is missing, the test is
    skipped; it fails in CI if CI should have it."""
    path = shutil.which(name)
    if path is None and package not in _PACKAGES.read_text().split():
        pytest.skip(f"there is no {name} here (Debian: {package})")
    return path or tool(name)
