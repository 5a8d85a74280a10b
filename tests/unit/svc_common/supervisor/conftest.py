"""Fixtures of the tests of the supervisor."""

from pathlib import Path

import pytest

from placeholder_services import write_services


@pytest.fixture
def services(tmp_path: Path) -> Path:
    """A directory of placeholder programs for `python -m worker_svc` and the other services."""
    write_services(tmp_path)
    return tmp_path
