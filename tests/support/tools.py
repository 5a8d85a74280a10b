"""Programs that tests need and Python packages do not contain."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

_PACKAGES = Path(__file__).parents[2] / ".ci" / "apt.txt"


def tool(name: str, package: str | None = None) -> str:
    """The path of a program of a Debian package, which is called as the program if it is not named. If the program is
    missing, the test is skipped; in CI, which installs it, the test fails."""
    # An activated environment has a redis-server of its own, which is older.
    own = Path(sys.prefix, "bin")
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(folder) != own]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        missing(f"there is no {name} on the PATH", package or name)
    return path


def missing(what: str, *packages: str) -> NoReturn:
    """Skips the test. It fails in CI, where nothing may be missing, and where CI would not install the packages."""
    listed = _PACKAGES.read_text().split()
    unlisted = [package for package in packages if package not in listed]
    if unlisted:
        pytest.fail(f"{what}, and .ci/apt.txt does not name {', '.join(unlisted)}")
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(f"{what} (Debian: {', '.join(packages)})" if packages else what)
