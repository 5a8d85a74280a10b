"""The ports of all roles. A conflict names the variable that solves it."""

import random
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

from svc_common.addresses import AddressInUse, CannotListen, check_can_listen, check_unix_socket, join_host_port
from svc_common.model_settings import ModelSettings
from svc_common.supervisor.settings import SupervisorSettings

LOOPBACK = "127.0.0.1"
UNIX_SCHEME = "unix:"
_FIRST_PORT = 16_384  # of those that are chosen for roles; below it are the usual ports of other services
_IANA_FIRST_OUTGOING_PORT = 49_152
_MAX_PROBES = 100
_RANDOM = random.SystemRandom()


@dataclass(frozen=True)
class ListenAddress:
    """An address of a role, and the variable that it came from."""

    host: str
    port: int
    variable: str

    @property
    def dial_address(self) -> str:
        """`host:port` for callers on this machine."""
        everywhere = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}
        return join_host_port(everywhere.get(self.host, self.host), self.port)


@dataclass(frozen=True)
class UnixAddress:
    """The path of a role's Unix socket, and the variable that it came from."""

    path: Path
    variable: str

    @property
    def dial_address(self) -> str:
        """`unix:` and the path."""
        return f"{UNIX_SCHEME}{self.path}"


@dataclass(frozen=True)
class Addresses:
    """The addresses of all roles: element i of a list is that of gateway, scheduler or worker i. Of several models, the
    workers of each follow those of the one before."""

    http: Sequence[ListenAddress | UnixAddress]
    grpc: list[ListenAddress]
    gateway_metrics: list[ListenAddress]
    """Empty where gateways have no port of metrics."""
    schedulers: list[ListenAddress]
    scheduler_admin: list[ListenAddress]
    scheduler_metrics: list[ListenAddress]
    workers: list[ListenAddress]
    worker_metrics: list[ListenAddress]

    @property
    def ports(self) -> Iterator[ListenAddress]:
        """Those with a port."""
        return (one for one in self._all() if isinstance(one, ListenAddress))

    @property
    def unix_sockets(self) -> Iterator[UnixAddress]:
        """Those with a path."""
        return (one for one in self._all() if isinstance(one, UnixAddress))

    def _all(self) -> Iterator[ListenAddress | UnixAddress]:
        return chain.from_iterable(getattr(self, field.name) for field in fields(self))

    def to_json(self) -> dict[str, list[str]]:
        """The lists as `host:port` or `unix:path`."""
        return {field.name: [one.dial_address for one in getattr(self, field.name)] for field in fields(self)}

    def check(self) -> None:
        """Raises CannotListen, naming the variable, where two are the same or one is not free."""
        taken: dict[int, ListenAddress] = {}
        for listener in self.ports:
            other = taken.setdefault(listener.port, listener)
            if other is not listener:
                names = f"{other.variable} and {listener.variable}"
                raise CannotListen(f"{names} both come to port {listener.port}; set one of them to another")
        for listener in self.ports:
            try:
                check_can_listen(listener.host, listener.port)
            except AddressInUse as error:
                advice = f"stop that process, or set {listener.variable} to another port"
                raise AddressInUse(f"{error}; {advice}") from error
            except CannotListen as error:
                raise CannotListen(f"{error} ({listener.variable}, QUIRE_HOST)") from error
        for unix in self.unix_sockets:
            try:
                check_unix_socket(unix.path)
            except CannotListen as error:
                raise CannotListen(f"{unix.variable}: {error}") from error


def assign(settings: SupervisorSettings, models: Sequence[ModelSettings], free_ports: "FreePorts") -> Addresses:
    """The addresses that the settings give to the roles of these models. A port of 0 is one of `free_ports`."""
    workers = sum(model.workers for model in models)
    counts = {"http_port": settings.gateways, "grpc_port": settings.gateways, "gateway_metrics_port": settings.gateways}
    counts |= dict.fromkeys(("scheduler_port", "scheduler_admin_port", "scheduler_metrics_port"), settings.schedulers)
    counts |= dict.fromkeys(("worker_port", "worker_metrics_port"), workers)
    for setting, count in counts.items():
        if first := getattr(settings, setting):
            free_ports.exclude(range(first, first + count))

    def listeners(setting: str, host: str = LOOPBACK) -> list[ListenAddress]:
        first: int | None = getattr(settings, setting)
        if first is None:
            return []
        ports = [first + i if first else free_ports.take() for i in range(counts[setting])]
        return [ListenAddress(host, port, f"QUIRE_{setting.upper()}") for port in ports]

    return Addresses(
        http=listeners("http_port", settings.host)
        if settings.uds is None
        else [UnixAddress(settings.uds.absolute(), "QUIRE_UDS")],
        grpc=listeners("grpc_port", settings.host),
        gateway_metrics=listeners("gateway_metrics_port", settings.host),
        schedulers=listeners("scheduler_port"),
        scheduler_admin=listeners("scheduler_admin_port"),
        scheduler_metrics=listeners("scheduler_metrics_port"),
        workers=listeners("worker_port"),
        worker_metrics=listeners("worker_metrics_port"),
    )


class FreePorts(AbstractContextManager["FreePorts"]):
    """Free ports of the loopback, for roles that this process starts. Until it is closed, the system gives them to
    nobody who asks for a free port and to no outgoing connection, also while a role is down."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._excluded: set[int] = set()

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def exclude(self, ports: Iterable[int]) -> None:
        """These are not taken from now on."""
        self._excluded.update(ports)

    def take(self) -> int:
        """A port that was never taken before. Raises CannotListen where none is free."""
        # Below the range of outgoing connections, since who keeps a port longer than this must not meet one there.
        candidates = range(_FIRST_PORT, _first_outgoing_port())
        for port in (*_RANDOM.sample(candidates, min(_MAX_PROBES, len(candidates))), 0):
            holder = self._held.enter_context(socket.socket())
            try:
                holder.bind((LOOPBACK, port))
            except OSError:
                continue
            if holder.getsockname()[1] in self._excluded:
                holder.close()
                continue
            # Servers set this, and may then listen beside a holder that does not. Set before, two could hold one port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return int(holder.getsockname()[1])
        raise CannotListen(f"there is no free port on {LOOPBACK}")


def _first_outgoing_port() -> int:
    """The lowest port of outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _IANA_FIRST_OUTGOING_PORT


def free_port() -> int:
    """A port of the loopback that was free just now."""
    with FreePorts() as ports:
        return ports.take()
