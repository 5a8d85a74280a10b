"""The table of roles: what each runs, what it is told, how it is asked whether it answers."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from svc_common.server import LIVENESS
from svc_common.supervisor.addresses import LOOPBACK, Addresses
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from svc_common.supervisor.launch import SchedPolicy
from svc_common.supervisor.probes import Probe, answers_grpc, answers_http, answers_redis
from svc_common.supervisor.settings import SupervisorSettings


class StartTier(IntEnum):
    """What stands on what. Tiers stop from the top, each when the one above it is gone."""

    STORE = 1
    WORKER = 2
    SCHEDULER = 3
    GATEWAY = 4


class OutputMode(Enum):
    """What becomes of a role's lines."""

    SHOWN = auto()
    KEPT = auto()
    """The last ones are shown if the role has to be given up."""


@dataclass(frozen=True)
class Role:
    """One process. `environment` comes on top of the supervisor's own."""

    name: str
    tier: StartTier
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)
    output: OutputMode = OutputMode.SHOWN

    @property
    def sched_policy(self) -> SchedPolicy:
        """A worker computes; the others hand on what it did while it computes the next, and need not interrupt it."""
        return SchedPolicy.NORMAL if self.tier is StartTier.WORKER else SchedPolicy.BATCH


def redis_role(redis: EmbeddedRedis) -> Role:
    """The embedded Redis. It writes of the machine's tuning at every start, which is for servers."""
    return Role("redis", StartTier.STORE, redis.command, answers_redis(redis.url), output=OutputMode.KEPT)


AddressMapper = Callable[[str, str], str]
"""What a role, by its name, is told to dial in order to reach an address: `host:port`, or the URL of Redis."""


def direct_address(_role: str, address: str) -> str:
    """Each role dials where the other listens."""
    return address


def service_roles(
    settings: SupervisorSettings, addresses: Addresses, redis_url: str, map_address: AddressMapper = direct_address
) -> list[Role]:
    """Workers, schedulers, gateways, in the order in which they start. Of several, each has its index in its name."""
    common = {"QUIRE_LOG_LEVEL": settings.log_level, **settings.model_environment}
    inner = {**common, "QUIRE_HOST": LOOPBACK}
    workers = [
        Role(
            name=_name("worker", index, settings.workers),
            tier=StartTier.WORKER,
            command=(sys.executable, "-m", "worker_svc"),
            probe=answers_grpc(address.dial_address),
            environment={
                **inner,
                "QUIRE_WORKER_PORT": str(address.port),
                "QUIRE_WORKER_METRICS_PORT": str(metrics.port),
            },
        )
        for index, (address, metrics) in enumerate(zip(addresses.workers, addresses.worker_metrics, strict=True))
    ]
    schedulers = [
        Role(
            name=(name := _name("scheduler", index, settings.schedulers)),
            tier=StartTier.SCHEDULER,
            command=(sys.executable, "-m", "scheduler_svc"),
            # One that stands by serves nobody, and is as it should be.
            probe=answers_grpc(address.dial_address, LIVENESS),
            environment={
                **inner,
                "QUIRE_SCHEDULER_PORT": str(address.port),
                "QUIRE_SCHEDULER_ADMIN_PORT": str(admin.port),
                "QUIRE_SCHEDULER_ADMIN_HOST": LOOPBACK,
                "QUIRE_SCHEDULER_METRICS_PORT": str(metrics.port),
                "QUIRE_WORKERS_AT": ",".join(map_address(name, worker.dial_address) for worker in addresses.workers),
                "QUIRE_REDIS_URL": map_address(name, redis_url),
                # The first leads at once; the others wait for it, also where they are up before it.
                **({"QUIRE_STANDBY": "1"} if index else {}),
            },
        )
        for index, (address, admin, metrics) in enumerate(
            zip(addresses.schedulers, addresses.scheduler_admin, addresses.scheduler_metrics, strict=True)
        )
    ]
    gateways = [
        Role(
            name=(name := _name("gateway", index, settings.gateways)),
            tier=StartTier.GATEWAY,
            command=(sys.executable, "-m", "gateway_svc"),
            # 200 once a scheduler and a worker stand behind it: the whole chain answers.
            probe=answers_http(http.dial_address, "/health"),
            environment={
                **common,
                "QUIRE_HOST": settings.host,
                "QUIRE_HTTP_PORT": str(http.port),
                "QUIRE_GRPC_PORT": str(grpc.port),
                "QUIRE_SCHEDULERS_AT": ",".join(map_address(name, each.dial_address) for each in addresses.schedulers),
                **({"QUIRE_API_KEYS": str(settings.api_keys)} if settings.api_keys else {}),
            },
        )
        for index, (http, grpc) in enumerate(zip(addresses.http, addresses.grpc, strict=True))
    ]
    return [*workers, *schedulers, *gateways]


def _name(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}-{index}"
