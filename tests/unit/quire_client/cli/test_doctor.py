"""`quire doctor`: the report of another program, as text and as JSON."""

import json
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from quire_client.cli.app import app

FINDINGS = [
    {"status": "ok", "found": "3.12", "role": "installation", "check": "python"},
    {
        "status": "wrong",
        "found": "127.0.0.1:8000",
        "problem": "the port is in use",
        "next_step": "stop it",
        "role": "gateway",
        "check": "ports",
    },
]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run; each reports FINDINGS."""
    called: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
        called.append(command[1:])
        report = json.dumps({"ok": False, "findings": FINDINGS})
        return subprocess.CompletedProcess(command, 1, report.encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("COLUMNS", "120")
    return called


def test_findings_are_lines_with_what_to_do(commands: list[list[str]]) -> None:
    result = CliRunner().invoke(
        app, ["doctor", "some/model", "--role", "gateway", "--port", "1"], standalone_mode=False
    )
    assert result.return_value == 1
    assert "127.0.0.1:8000: the port is in use → stop it" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 ok, 1 wrong"
    assert commands == [
        ["-B", "-P", "-m", "svc_common.doctor", "--json", "some/model", "--role", "gateway", "--port", "1"]
    ]


def test_json_is_the_report(commands: list[list[str]]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"], standalone_mode=False)
    assert json.loads(result.stdout) == {"ok": False, "findings": FINDINGS}
    assert len(commands) == 1


def test_without_the_services_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install --editable '.[local]'" in result.output
