"""`from quire import LLM`, beside the contracts."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import quire
import quire_offline

ROOT = Path(__file__).parents[3]


def test_the_classes_are_in_the_package_of_the_contracts() -> None:
    from quire import LLM, AsyncLLM, SamplingParams

    assert (LLM, AsyncLLM, SamplingParams) == (
        quire_offline.LLM,
        quire_offline.AsyncLLM,
        quire_offline.SamplingParams,
    )
    assert set(quire.__all__) <= set(quire_offline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = quire.Nothing


def test_without_the_parts_of_a_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quire_offline", None)
    with pytest.raises(
        ImportError, match=r"quire.LLM needs the parts of a server.*pip install --editable '\.\[local\]'"
    ):
        from quire import LLM  # noqa: F401


def test_contracts_do_not_import_the_classes() -> None:
    program = "import sys, quire.inference.v1.inference_pb2; print('quire_offline' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "protos")},
    )
    assert done.stdout == "False\n"


def test_contracts_in_other_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quire" / "elsewhere").mkdir(parents=True)
    (tmp_path / "quire" / "elsewhere" / "contract.py").write_text("NAME = 'mine'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quire, "__path__", list(quire.__path__))
    reloaded = importlib.reload(quire)
    assert str(tmp_path / "quire") in list(reloaded.__path__)
