"""The example program and the notebook run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert_models import save_bert

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "client" / "examples" / "python"
SETTINGS = {"QUIRE_DTYPE": "float32", "QUIRE_NUM_THREADS": "1", "QUIRE_NUM_BLOCKS": "64", "QUIRE_SWAP_SPACE": "0"}


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    save_bert(tmp_path)
    return tmp_path


def test_the_program_prints_its_outputs(model: Path, encoder: Path) -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "protos", "kernels", "client"))
    done = subprocess.run(
        [sys.executable, EXAMPLES / "offline.py", model, encoder],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | SETTINGS | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "'A quire is'",
        "'Paper is made of'",
        "'The first printed book was'",
        "answer",
        *("'A quire is'", "'Paper is made of'", "'The first printed book was'"),
        *("'A quire is' and 'Paper is made of'", "'A quire is' and 'The first printed book was'"),
    ]


def test_the_cells_of_the_notebook_run(
    model: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "offline.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for name, value in (SETTINGS | {"QUIRE_MODEL": str(model), "EMBEDDING_MODEL": str(encoder)}).items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert capsys.readouterr().out.count("|") >= 3
    vectors, scores = names["vectors"], names["scores"]
    assert isinstance(vectors, list)
    assert isinstance(scores, list)
    assert ([len(vector) for vector in vectors], len(scores)) == ([48] * 3, 3)
