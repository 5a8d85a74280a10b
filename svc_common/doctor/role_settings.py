"""The check of a role's settings: by its own model of them, as at its start."""

from collections.abc import Collection
from typing import Any

from svc_common.doctor.findings import Finding, ok, skipped, wrong
from svc_common.settings import InvalidSettings, parse_settings


def read_role_settings(
    kind: Any, reported: Collection[str] = (), set_by_supervisor: Collection[str] = ()
) -> tuple[Any, list[Finding]]:
    """The settings in the environment, None where they are invalid, and findings.

    Lines about invalid values that are `reported` are left out, and so are variables that the supervisor sets itself.
    """
    try:
        settings = parse_settings(kind, [])
    except InvalidSettings as error:
        step = "set the variable to such a value, or unset it; docs/settings.md lists all of them"
        new = [wrong("", line, step) for line in error.lines if line not in reported]
        return None, [*new, skipped("its other checks need valid settings")]
    given = sorted({f"QUIRE_{name.upper()}" for name in settings.model_fields_set} - set(set_by_supervisor))
    return settings, [ok(f"valid; set: {', '.join(given) or 'none'}")]
