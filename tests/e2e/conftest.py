"""Fixtures of the end-to-end tests: the prepared default model and its continuations by transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from reference import Reference, kept_references
from svc_common.models import resolve_model


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the default model, prepared once."""
    subprocess.run([sys.executable, "-m", "worker_svc.prepare"], check=True)
    return resolve_model(None).path


@pytest.fixture(scope="session")
def judged(model: Path) -> list[Reference]:
    """The forty prompts with their reference continuations."""
    return kept_references(model)
