"""What end-to-end tests share: the prepared default model, and what transformers makes of it."""

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
    """The forty prompts with their right continuations."""
    return kept_references(model)
