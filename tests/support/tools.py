"""Programs that tests run and that Python packages do not bring."""

import os
import shutil

import pytest


def tool(name: str) -> str:
    """The path of a program. Where it is not installed the test is skipped, and fails in CI, which installs it."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"there is no {name} on the PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{message}: it belongs in .ci/apt.txt")
    pytest.skip(message)
