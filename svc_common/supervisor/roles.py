"""The roles: the program, environment and probe of each."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from pathlib import Path

from svc_common.model_settings import ModelSettings
from svc_common.server import LIVENESS
from svc_common.supervisor.addresses import LOOPBACK, Addresses, ListenAddress, UnixAddress
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from svc_common.supervisor.probes import Probe, answers_grpc, answers_http, answers_redis
from svc_common.supervisor.settings import SupervisorSettings


class StartTier(IntEnum):
    """A role depends on roles of lower tiers only. Roles are stopped from the highest tier down, each tier when the one
    above it has ended."""

    STORE = 1
    WORKER = 2
    SCHEDULER = 3
    GATEWAY = 4


@dataclass(frozen=True)
class Role:
    """One process. `environment` is added to the supervisor's own. Without `shows_output`, only the last lines are
    shown, if the role fails."""

    name: str
    tier: StartTier
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)
    shows_output: bool = True


def redis_role(redis: EmbeddedRedis) -> Role:
    """The embedded Redis. Its output is hidden: at every start it advises on tuning the machine."""
    return Role("redis", StartTier.STORE, redis.command, answers_redis(redis.url), shows_output=False)


AddressMapper = Callable[[str, str], str]
"""The address that a role, by its name, dials to reach an address: `host:port`, or the URL of Redis."""


def direct_address(_role: str, address: str) -> str:
    """Roles dial each other's addresses; tests put proxies between."""
    return address


def service_roles(
    settings: SupervisorSettings,
    models: Sequence[ModelSettings],
    addresses: Addresses,
    redis_url: str,
    map_address: AddressMapper = direct_address,
    secret_file: Path | None = None,
) -> list[Role]:
    """Workers, schedulers, gateways. Of several, names end in an index; workers of a models file are named by model.

    `secret_file` has the secret by which they prove their roles to each other; None: they do not.
    """
    common = {"QUIRE_LOG_LEVEL": settings.log_level, **_credentials(secret_file)}
    inner = {**common, "QUIRE_HOST": LOOPBACK}
    return [
        *_worker_roles(settings, models, addresses, inner),
        *_scheduler_roles(settings, addresses, redis_url, map_address, inner),
        *_gateway_roles(settings, models, addresses, map_address, common),
    ]


def _worker_roles(
    settings: SupervisorSettings, models: Sequence[ModelSettings], addresses: Addresses, inner: Mapping[str, str]
) -> list[Role]:
    return [
        Role(
            name=name,
            tier=StartTier.WORKER,
            command=(sys.executable, "-m", "worker_svc"),
            probe=answers_grpc(address.dial_address),
            environment={
                **inner,
                **model.environment,
                "QUIRE_WORKER_PORT": str(address.port),
                "QUIRE_WORKER_METRICS_PORT": str(metrics.port),
            },
        )
        for (name, model), address, metrics in zip(
            _workers(settings, models), addresses.workers, addresses.worker_metrics, strict=True
        )
    ]


def _scheduler_roles(
    settings: SupervisorSettings,
    addresses: Addresses,
    redis_url: str,
    map_address: AddressMapper,
    inner: Mapping[str, str],
) -> list[Role]:
    return [
        Role(
            name=(name := _name("scheduler", index, settings.schedulers)),
            tier=StartTier.SCHEDULER,
            command=(sys.executable, "-m", "scheduler_svc"),
            # A standby is live, and serves nothing.
            probe=answers_grpc(address.dial_address, LIVENESS),
            environment={
                **inner,
                "QUIRE_SCHEDULER_PORT": str(address.port),
                "QUIRE_SCHEDULER_ADMIN_PORT": str(admin.port),
                "QUIRE_SCHEDULER_ADMIN_HOST": LOOPBACK,
                "QUIRE_SCHEDULER_METRICS_PORT": str(metrics.port),
                "QUIRE_WORKERS_AT": ",".join(map_address(name, worker.dial_address) for worker in addresses.workers),
                "QUIRE_REDIS_URL": map_address(name, redis_url),
                "QUIRE_REDIS_PREFIX": settings.redis_prefix,
                # The first leads at once; the others wait for it, even where they start faster.
                **({"QUIRE_STANDBY": "1"} if index else {}),
            },
        )
        for index, (address, admin, metrics) in enumerate(
            zip(addresses.schedulers, addresses.scheduler_admin, addresses.scheduler_metrics, strict=True)
        )
    ]


def _gateway_roles(
    settings: SupervisorSettings,
    models: Sequence[ModelSettings],
    addresses: Addresses,
    map_address: AddressMapper,
    common: Mapping[str, str],
) -> list[Role]:
    return [
        Role(
            name=(name := _name("gateway", index, settings.gateways)),
            tier=StartTier.GATEWAY,
            command=(sys.executable, "-m", "gateway_svc"),
            # 200 once it has a scheduler with a worker.
            probe=answers_http(http.dial_address, "/health", has_tls=settings.tls_cert_file is not None),
            environment={
                **common,
                **_gateway_models(settings, models),
                "QUIRE_HOST": settings.host,
                **_http(http),
                "QUIRE_GRPC_PORT": str(grpc.port),
                "QUIRE_SCHEDULERS_AT": ",".join(map_address(name, each.dial_address) for each in addresses.schedulers),
                **({"QUIRE_GATEWAY_METRICS_PORT": str(metrics.port)} if metrics else {}),
                **_tls(settings),
                **({"QUIRE_API_KEYS": str(settings.api_keys)} if settings.api_keys else {}),
                **({} if settings.seed is None else {"QUIRE_SEED": str((settings.seed + index) % 2**32)}),
            },
        )
        for index, (http, grpc, metrics) in enumerate(
            zip(
                addresses.http,
                addresses.grpc,
                addresses.gateway_metrics or repeat(None, settings.gateways),
                strict=True,
            )
        )
    ]


def _credentials(secret_file: Path | None) -> dict[str, str]:
    """Variables of services' credentials."""
    # A certificate of the supervisor's environment has one role, and is not for all of them.
    inherited = dict.fromkeys(("QUIRE_MTLS_CERT_FILE", "QUIRE_MTLS_KEY_FILE", "QUIRE_MTLS_CA_FILE"), "")
    if secret_file is None:
        return {**inherited, "QUIRE_INSECURE": "1"}
    return {**inherited, "QUIRE_INSECURE": "0", "QUIRE_DEPLOYMENT_SECRET_FILE": str(secret_file.absolute())}


def _http(address: ListenAddress | UnixAddress) -> dict[str, str]:
    """Variables of where a gateway serves HTTP."""
    if isinstance(address, UnixAddress):
        return {"QUIRE_UDS": str(address.path)}
    return {"QUIRE_HTTP_PORT": str(address.port), "QUIRE_UDS": ""}


def _tls(settings: SupervisorSettings) -> dict[str, str]:
    """Variables of TLS for clients."""
    files = {"QUIRE_TLS_CERT_FILE": settings.tls_cert_file, "QUIRE_TLS_KEY_FILE": settings.tls_key_file}
    return {name: str(path) for name, path in files.items() if path is not None}


def _workers(settings: SupervisorSettings, models: Sequence[ModelSettings]) -> list[tuple[str, ModelSettings]]:
    """Each worker's name and model."""
    if settings.models is None:
        (model,) = models
        return [(_name("worker", index, model.workers), model) for index in range(model.workers)]
    return [(f"worker-{model.names[0]}-{index}", model) for model in models for index in range(model.workers)]


def _gateway_models(settings: SupervisorSettings, models: Sequence[ModelSettings]) -> dict[str, str]:
    """Variables that name the models of gateways."""
    if settings.models is None:
        (model,) = models
        return {**model.environment, **settings.gateway_environment}
    return {"QUIRE_MODELS": str(settings.models)}


def _name(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}-{index}"
