"""`quire quantize` runs the program of the services with what it was given, and ends as that does."""

import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from quire_client.cli.app import app


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run; each ends with 1."""
    called: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
        called.append(command[1:])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    return called


def test_it_gives_its_arguments_on(commands: list[list[str]]) -> None:
    asked = ["quantize", "a model", "out", "--format", "w4a16", "--group-size", "64", "--revision", "main", "--json"]
    ended = CliRunner().invoke(app, asked, standalone_mode=False)
    flags = ["--format=w4a16", "--group-size=64", "--revision=main", "--json"]
    assert commands == [["-m", "worker_svc.quantize", *flags, "--", "a model", "out"]]
    assert ended.return_value == 1


def test_another_format_is_refused(commands: list[list[str]]) -> None:
    ended = CliRunner().invoke(app, ["quantize", "model", "out", "--format", "w2a2"])
    assert ended.exit_code == 2
    assert commands == []
