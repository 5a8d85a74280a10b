"""The record of what ran with each client, from which docs/clients.md has its table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from benchmarks.record import RESULTS, read_result, write_result
from tests.clients.table import CLIENTS

RECORD = RESULTS / "clients.json"


class Outcome(StrEnum):
    """How the run of a client's program ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It did not run."""


@dataclass(frozen=True)
class ClientRun:
    """A run of a client's program: the number of its checks, and the names of those that failed."""

    version: str
    outcome: Outcome
    checks: int = 0
    failed: tuple[str, ...] = ()
    reason: str | None = None
    """Why it did not run, or did not run to its end."""

    def to_json(self) -> dict[str, Any]:
        """Without what is absent."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


def recorded(record: Mapping[str, Any], name: str, run: ClientRun, code: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a run, made with this `code`, in the order of the clients.

    Where the program did not run, what ran with the same version stays.
    """
    before = record.get(name)
    if before is not None and run.outcome is Outcome.SKIPPED and before["version"] == run.version:
        return dict(record)
    entries = {**record, name: {**run.to_json(), **code}}
    return {client.name: entries[client.name] for client in CLIENTS if client.name in entries}


def read_record() -> dict[str, Any]:
    """The latest run of each client, by name."""
    return read_result(RECORD) or {}


def write_run(name: str, run: ClientRun, code: Mapping[str, Any]) -> None:
    """Writes a run into the record."""
    write_result(RECORD, recorded(read_record(), name, run, code))
