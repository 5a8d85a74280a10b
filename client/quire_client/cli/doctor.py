"""`quire doctor`: shows what the doctor of the services reports, where they are installed beside the client."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire_client.cli.output import print_json, print_table
from quire_client.cli.services import DOCTOR, service_command

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "skipped": "dim"}
_HELP = {"-h", "--help"}


def doctor(context: typer.Context) -> int:
    """Check this machine, the installation and the settings, and say what to do. Changes nothing."""
    # It writes no __pycache__ (-B), and imports nothing from the working directory (-P).
    command = service_command(DOCTOR, "--json", *context.args, flags=("-B", "-P"))
    if _HELP & set(context.args):
        return subprocess.run(command, check=False).returncode
    with Console(stderr=True).status("checking, up to a minute"):
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        report: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:  # it has written an error
        return ended.returncode or 1
    if "--json" in context.args:
        print_json(report)
    else:
        _print_findings(report["findings"])
    return ended.returncode


def _print_findings(findings: list[Mapping[str, str]]) -> None:
    """A line for each finding, longer ones wrapped in their column."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        status = finding["status"]
        text = Text(": ".join(filter(None, (finding.get("found"), finding.get("problem")))))
        if step := finding.get("next_step"):
            text.append(f" → {step}", style="bold")
        table.add_row(Text(status, style=_STYLES[status]), finding["role"], finding["check"], text)
    print_table(table)
    counts = {status: sum(finding["status"] == status for finding in findings) for status in _STYLES}
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count or status == "wrong"))
