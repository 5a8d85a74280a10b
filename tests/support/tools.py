"""Programs that tests need and Python packages do not contain."""

import os
import shutil

import pytest


def tool(name: str) -> str:
    """The path of a program. If it is not installed, the test is skipped; in CI, which installs it, the test fails."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"there is no {name} on the PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{message}: it belongs in .ci/apt.txt")
    pytest.skip(message)
