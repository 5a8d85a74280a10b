"""Fixtures of the tests of `make gpu-check`."""

from pathlib import Path

import pytest

from few_packages import make_environment

NEEDED = (
    *("torch", "triton", "transformers", "numpy", "pytest"),
    # Of what transformers requires, the packages that Quire names too
    *("huggingface-hub", "pyyaml", "safetensors", "tokenizers"),
)


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing but what `make gpu-check` says that it needs."""
    return make_environment(tmp_path_factory.mktemp("bare"), NEEDED)
