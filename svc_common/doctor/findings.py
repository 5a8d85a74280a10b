"""What `quire doctor` reports: findings, the checks that make them, and their form in JSON. Standard library only."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_SECONDS = 15.0


class Status(StrEnum):
    """The result of a check. Only WRONG makes the exit code 1."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    SKIPPED = "skipped"
    """Not checked, since something else must be put right first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found and, unless it is ok, what is wrong with it and what to do next.

    `role` and `check` are filled in by `run_check`.
    """

    status: Status
    found: str
    problem: str = ""
    next_step: str = ""
    role: str = ""
    check: str = ""

    def to_json(self) -> dict[str, str]:
        """The fields that have a value."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items() if value}

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> "Finding":
        names = ("found", "problem", "next_step", "role", "check")
        return cls(Status(fields["status"]), *(fields.get(name, "") for name in names))


def ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def warning(found: str, problem: str, next_step: str) -> Finding:
    return Finding(Status.WARNING, found, problem, next_step)


def wrong(found: str, problem: str, next_step: str) -> Finding:
    return Finding(Status.WRONG, found, problem, next_step)


def skipped(problem: str) -> Finding:
    return Finding(Status.SKIPPED, "not checked", problem)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What a check gets: the valid settings of its role, if it has any, and how the role is started."""

    settings: Any = None
    roles: tuple[str, ...] = ()
    """Roles that are checked."""
    by_supervisor: bool = False
    """Whether `make run` starts the role, and so prepares models, gives it its ports and makes its secret."""
    num_processes: int = 1
    """Processes of this role with these settings on this machine."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name. `find` may take `seconds`, and may raise anything: both are findings, too."""

    name: str
    find: Callable[[CheckContext], Iterable[Finding]]
    seconds: float = _SECONDS


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """The checks of a role, in their order, and the class of its settings; None: they need no settings."""

    checks: tuple[Check, ...]
    settings: Any = None
