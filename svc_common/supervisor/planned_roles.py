"""The roles that settings would start, and whether each accepts its own settings. Nothing is started or written."""

from pkgutil import resolve_name

from svc_common.identity import SECRET_FILE
from svc_common.model_settings import InvalidModelsFile
from svc_common.models import ModelNotFound
from svc_common.server import CannotListen
from svc_common.settings import make_settings
from svc_common.supervisor.addresses import FreePorts, assign
from svc_common.supervisor.roles import Role, StartTier, service_roles
from svc_common.supervisor.settings import SupervisorSettings

_NO_REDIS = "redis://127.0.0.1:6379/0"
"""In place of the URL of an embedded Redis that does not run yet."""

_SETTINGS = {
    StartTier.WORKER: "worker_svc.settings:WorkerSettings",
    StartTier.SCHEDULER: "scheduler_svc.settings:SchedulerSettings",
    StartTier.GATEWAY: "gateway_svc.settings:GatewaySettings",
}
"""The settings of a service, by name only: svc_common imports no service."""


def planned_roles(settings: SupervisorSettings) -> list[Role]:
    """All services that the supervisor would start. Raises InvalidModelsFile, ModelNotFound and CannotListen."""
    models = settings.model_settings()
    secret = settings.deployment_secret_file or settings.run_dir / SECRET_FILE
    redis_url = settings.redis_url.get_secret_value() if settings.redis_url else _NO_REDIS
    with FreePorts() as free_ports:
        addresses = assign(settings, models, free_ports)
        secret_file = None if settings.insecure else secret
        return service_roles(settings, models, addresses, redis_url, secret_file=secret_file)


def check_planned_roles(settings: SupervisorSettings) -> None:
    """Raises InvalidSettings where a service would refuse its settings."""
    try:
        roles = planned_roles(settings)
    except (InvalidModelsFile, ModelNotFound, CannotListen):  # the start reports it
        return
    for role in roles:
        kind = resolve_name(_SETTINGS[role.tier])
        values = {variable.removeprefix("QUIRE_").lower(): text for variable, text in role.environment.items()}
        known = {name: text for name, text in values.items() if name in kind.model_fields}
        make_settings(kind, known).check_start()
