"""What end-to-end tests share: the prepared default model, and what transformers makes of it."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import reference
from reference import Reference, references
from svc_common.models import resolve_model


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the default model, prepared once."""
    subprocess.run([sys.executable, "-m", "worker_svc.prepare"], check=True)
    return resolve_model(None).path


@pytest.fixture(scope="session")
def judged(model: Path, request: pytest.FixtureRequest) -> list[Reference]:
    """The forty prompts with their right continuations, which take minutes once and are then kept in pytest's cache.

    They are made anew where anything changes that they come from: the model, the libraries, the way they are made.
    """
    weights = (model / "model.safetensors").stat()
    origin = (transformers.__version__, torch.__version__, weights.st_size, weights.st_mtime_ns)
    made_by = hashlib.sha256(Path(reference.__file__).read_bytes() + repr(origin).encode()).hexdigest()
    cache = request.config.cache
    assert cache is not None
    kept = cache.get(f"quire/references-{made_by}", None)
    if kept is None:
        found = references(model)
        cache.set(f"quire/references-{made_by}", [[r.prompt, r.tokens, sorted(r.ties)] for r in found])
        return found
    return [Reference(tuple(prompt), tuple(tokens), frozenset(ties)) for prompt, tokens, ties in kept]
