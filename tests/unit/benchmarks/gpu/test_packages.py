"""`make gpu-check` runs where nothing is but torch, triton, transformers, numpy and pytest, and what these
require.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.tests import FOLDERS, IGNORED, PYTHON_PATH, collect
from benchmarks.record import ROOT

IMPORT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
# Folders of the parts and the tests, and of modules that are imported late: on a GPU alone, or by their names.
IMPORTED = (
    *("benchmarks/gpu", "benchmarks/kernels", *FOLDERS, "kernels/quire_kernels", "worker_svc/gpu"),
    *("worker_svc/drafters", "worker_svc/logit_filters", "worker_svc/model/architectures", "worker_svc/model/formats"),
)


def _modules() -> Iterator[str]:
    for folder in IMPORTED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(IGNORED):
                yield name.removeprefix("kernels/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without Triton's interpreter, as on a GPU."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PYTHON_PATH)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["llguidance", "pydantic", "prometheus_client", "grpc", "redis", "rich"])
def test_what_the_services_need_is_not_there(package: str, bare_python: Path) -> None:
    assert f"No module named '{package}'" in _run(bare_python, "-c", f"import {package}").stderr


def test_all_modules_can_be_imported(bare_python: Path) -> None:
    """And no kernel runs meanwhile: on a GPU it would need its arguments there."""
    modules = list(_modules())
    assert {part.module[0] for part in PARTS if part.module} <= {name.removesuffix(".__main__") for name in modules}
    done = _run(bare_python, "-c", IMPORT, *modules)
    assert done.returncode == 0, done.stderr


def test_all_tests_can_be_collected(bare_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(bare_python))
    names, problem = collect()
    assert problem is None
    assert {str(Path(name.partition("::")[0]).parent) for name in names} == set(FOLDERS)
