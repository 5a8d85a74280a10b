"""Which role may call which service on the inner ports. No other place decides it."""

from collections.abc import Mapping
from enum import StrEnum

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection


class ServiceRole(StrEnum):
    """What a process is to the other services of its deployment."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"
    """An operator, with `quire explain` or another client of the admin service."""


HEALTH_SERVICE: str = health.SERVICE_NAME
"""The one service that answers calls without a credential."""

MAY_CALL: Mapping[str, frozenset[ServiceRole]] = {
    "quire.scheduler.v1.SchedulerService": frozenset({ServiceRole.GATEWAY}),
    "quire.worker.v1.WorkerService": frozenset({ServiceRole.SCHEDULER}),
    "quire.admin.v1.AdminService": frozenset({ServiceRole.ADMIN}),
    reflection.SERVICE_NAME: frozenset({ServiceRole.ADMIN}),
    "grpc.reflection.v1.ServerReflection": frozenset({ServiceRole.ADMIN}),
}
"""The roles that may call a service, by its full name. Nobody may call a service that is not listed."""


def service_of(method: str) -> str:
    """The service in a method's full name, "/package.Service/Method"."""
    return method.strip("/").rpartition("/")[0]
