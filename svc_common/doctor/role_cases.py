"""The environments in which `make run` starts a role, so that its own checks see what its processes would see."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from svc_common.model_settings import InvalidModelsFile
from svc_common.models import ModelNotFound
from svc_common.server import CannotListen
from svc_common.settings import InvalidSettings, parse_settings
from svc_common.supervisor.planned_roles import planned_roles
from svc_common.supervisor.settings import SupervisorSettings

_OF_MODEL: tuple[str, ...] = ("QUIRE_MODEL", "QUIRE_REVISION")

_BY_SUPERVISOR = frozenset({"credentials", "ports"})
"""Checks of a role that those of `make run` replace."""


@dataclass(frozen=True)
class RoleCase:
    """An environment of a role: what is added to this process's own, and which checks do not apply.

    `reported` are lines about invalid settings that the checks of `make run` report already.
    """

    label: str
    environment: Mapping[str, str] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    num_processes: int = 1
    reported: frozenset[str] = frozenset()


def role_cases(role: str) -> list[RoleCase]:
    """One case for each model of the workers; one for all gateways, and one for all schedulers."""
    try:
        settings = parse_settings(SupervisorSettings, [])
        roles = planned_roles(settings)
    except InvalidSettings as error:
        return [RoleCase(role, skipped=_BY_SUPERVISOR | {"redis"}, reported=frozenset(error.lines))]
    except (InvalidModelsFile, ModelNotFound, CannotListen):  # the checks of `make run` report it
        return [RoleCase(role, skipped=_BY_SUPERVISOR | {"redis", "model", "memory"})]
    skipped = _BY_SUPERVISOR if settings.redis_url else _BY_SUPERVISOR | {"redis"}
    found: dict[str, RoleCase] = {}
    for each in roles:
        if each.name.split("-")[0] == role:
            names = _OF_MODEL if role == "worker" else ()
            model = " at ".join(each.environment[name] for name in names if name in each.environment)
            count = found[model].num_processes + 1 if model in found else 1
            found[model] = RoleCase(role, each.environment, skipped, count)
    if len(found) == 1:
        return list(found.values())
    return [
        RoleCase(f"{role} of {model or 'the default model'}", case.environment, skipped, case.num_processes)
        for model, case in found.items()
    ]
