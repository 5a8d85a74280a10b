"""Gives every role its ports, and tells a clash by the variable that mends it."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from svc_common.addresses import AddressInUse, CannotListen, check_can_listen, join_host_port
from svc_common.supervisor.settings import SupervisorSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ListenAddress:
    """An address of a role, and the variable that it came from."""

    host: str
    port: int
    variable: str

    @property
    def dial_address(self) -> str:
        """`host:port` for whoever calls from this machine."""
        everywhere = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}
        return join_host_port(everywhere.get(self.host, self.host), self.port)


@dataclass(frozen=True)
class Addresses:
    """Where everything listens; element i of a list belongs to gateway, scheduler or worker i."""

    http: list[ListenAddress]
    grpc: list[ListenAddress]
    schedulers: list[ListenAddress]
    scheduler_admin: list[ListenAddress]
    scheduler_metrics: list[ListenAddress]
    workers: list[ListenAddress]
    worker_metrics: list[ListenAddress]

    def __iter__(self) -> Iterator[ListenAddress]:
        yield from (*self.http, *self.grpc)
        yield from (*self.schedulers, *self.scheduler_admin, *self.scheduler_metrics)
        yield from (*self.workers, *self.worker_metrics)

    def check(self) -> None:
        """Raises CannotListen, naming the variable, where two are the same or one is not free."""
        taken: dict[int, ListenAddress] = {}
        for listener in self:
            other = taken.setdefault(listener.port, listener)
            if other is not listener:
                names = f"{other.variable} and {listener.variable}"
                raise CannotListen(f"{names} both come to port {listener.port}; set one of them to another")
        for listener in self:
            try:
                check_can_listen(listener.host, listener.port)
            except AddressInUse as error:
                advice = f"stop that process, or set {listener.variable} to another port"
                raise AddressInUse(f"{error}; {advice}") from error
            except CannotListen as error:
                raise CannotListen(f"{error} ({listener.variable}, QUIRE_HOST)") from error


def assign(settings: SupervisorSettings) -> Addresses:
    """The addresses that the settings come to."""
    gateways, schedulers, workers = range(settings.gateways), range(settings.schedulers), range(settings.workers)

    def inner(port: int, variable: str, roles: range) -> list[ListenAddress]:
        return [_listener(LOOPBACK, port, i, variable) for i in roles]

    return Addresses(
        http=[_listener(settings.host, settings.http_port, i, "QUIRE_HTTP_PORT") for i in gateways],
        grpc=[_listener(settings.host, settings.grpc_port, i, "QUIRE_GRPC_PORT") for i in gateways],
        schedulers=inner(settings.scheduler_port, "QUIRE_SCHEDULER_PORT", schedulers),
        scheduler_admin=inner(settings.scheduler_admin_port, "QUIRE_SCHEDULER_ADMIN_PORT", schedulers),
        scheduler_metrics=inner(settings.scheduler_metrics_port, "QUIRE_SCHEDULER_METRICS_PORT", schedulers),
        workers=inner(settings.worker_port, "QUIRE_WORKER_PORT", workers),
        worker_metrics=inner(settings.worker_metrics_port, "QUIRE_WORKER_METRICS_PORT", workers),
    )


def _listener(host: str, port: int, index: int, variable: str) -> ListenAddress:
    return ListenAddress(host, port + index if port else free_port(), variable)


def free_port() -> int:
    """A port of the loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
