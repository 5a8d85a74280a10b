"""Writes the table of clients into docs/clients.md from what ran: `python -m docs.tools.clients`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import version
from docs.tools.sections import with_sections
from tests.clients.record import Outcome, read_record
from tests.clients.table import CLIENTS, Client

PAGE = Path(__file__).parents[1] / "clients.md"


def page(text: str, record: Mapping[str, Any]) -> str:
    """The page with the table. Raises ValueError where it lacks the section."""
    rows = "".join(
        f"| {client.name} | `{client.package}` | {client.version} | {_run(client, record.get(client.name))} "
        f"| {client.tested} |\n"
        for client in CLIENTS
    )
    head = "| client | package | version | latest run | what is tested |\n|---|---|---|---|---|\n"
    return with_sections(text, {"clients": head + rows})


def _run(client: Client, entry: dict[str, Any] | None) -> str:
    """How the latest run of a client's program ended, and on which code."""
    if entry is None or entry["version"] != client.version:
        return "**none with this version**"
    if entry["outcome"] == Outcome.SKIPPED:
        return f"**skipped: {entry['reason']}**"
    if entry["outcome"] == Outcome.FAILED:
        why = ", ".join(f"`{name}`" for name in entry.get("failed", ())) or entry["reason"]
        return f"**failed: {why}**; {version(entry)}"
    return f"{entry['checks']} checks passed; {version(entry)}"


def write_page() -> None:
    """Writes the table anew."""
    PAGE.write_text(page(PAGE.read_text(), read_record()))


if __name__ == "__main__":
    write_page()
