"""Writes the tables of docs/settings.md from the services' settings: `python -m docs.tools.settings`."""

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from docs.tools.sections import with_sections
from gateway_svc.settings import GatewaySettings
from scheduler_svc.settings import SchedulerSettings
from svc_common.settings import ServiceSettings
from svc_common.supervisor.settings import SupervisorSettings
from worker_svc.settings import WorkerSettings

PAGE = Path(__file__).parents[1] / "settings.md"
SERVICES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
_HEAD = "| variable | default | values | meaning |\n|---|---|---|---|\n"
_BOUNDS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def tables() -> dict[str, str]:
    """The tables by the name of their section. What several services read alike is in a section of its own."""
    found: dict[str, dict[str, tuple[FieldInfo, list[str]]]] = {"shared": {}, **{service: {} for service in SERVICES}}
    for service, kind in SERVICES.items():
        for name, field in kind.model_fields.items():
            readers = [other for other, its in SERVICES.items() if _is_same(its.model_fields.get(name), field)]
            section = service if len(readers) == 1 else "shared"
            found[section].setdefault(name, (field, readers))
    supervisor = {name: (field, ["make run"]) for name, field in SupervisorSettings.model_fields.items()}
    written = {"shared": _shared(found.pop("shared"))}
    for section, rows in [*found.items(), ("make run", supervisor)]:
        written[section] = _HEAD + "".join(_row(name, field) for name, (field, _) in rows.items())
    return written


def page(text: str) -> str:
    """The page with its tables as the settings say. Raises ValueError where it lacks the section of a table."""
    return with_sections(text, tables())


def _is_same(one: FieldInfo | None, other: FieldInfo) -> bool:
    return one is not None and (one.default, one.description) == (other.default, other.description)


def _shared(rows: dict[str, tuple[FieldInfo, list[str]]]) -> str:
    head = "| variable | read by | default | values | meaning |\n|---|---|---|---|---|\n"
    cells = [
        _row(name, field).replace(" | ", f" | {', '.join(readers)} | ", 1) for name, (field, readers) in rows.items()
    ]
    return head + "".join(cells)


def _row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `QUIRE_{name.upper()}` | {_default(field.default)} | {_values(field)} | {meaning} |\n"


def _default(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value} ({value // 2**20:,} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: FieldInfo) -> str:
    bounds = [f"{_BOUNDS[type(one)]} {_number(one)}" for one in field.metadata if type(one) in _BOUNDS]
    if bounds:
        return ", ".join(bounds)
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(str, get_args(field.annotation)))
    patterns = [one.pattern for one in field.metadata if getattr(one, "pattern", None)]
    alternatives = re.fullmatch(r"\^\(([a-z|]+)\)\$", patterns[0]) if patterns else None
    if alternatives:
        return alternatives[1].replace("|", ", ")
    return "true, false" if isinstance(field.default, bool) else ""


def _number(bound: Any) -> str:
    (value,) = (getattr(bound, name) for name in ("ge", "gt", "le", "lt") if hasattr(bound, name))
    return _default(value)


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
