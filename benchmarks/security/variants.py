"""The deployments that are compared, and how the load generator reaches them."""

import sys
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import grpc

from benchmarks.deployment import Deployment, running_quire, scrape
from certificates import Authority
from quire_client.aio import AsyncClient
from quire_client.bench.targets import BenchTarget, OpenAITarget, QuireTarget
from quire_client.http_client import http_client
from svc_common.service_roles import ServiceRole

NUM_TENANTS = 8
_HOST_NAMES = ("DNS:localhost", "IP:127.0.0.1")


class Part(StrEnum):
    """What is measured."""

    TLS = "tls"
    """Mutual TLS between the services, and TLS on both ports of clients."""
    LIMITS = "limits"
    """Each field of a key's table."""


class Protocol(StrEnum):
    """How clients call."""

    GRPC = "gRPC"
    HTTP = "HTTP"


@dataclass(frozen=True)
class Variant:
    """A deployment with some of the parts, or none. Each tenant has a key in each."""

    title: str
    parts: frozenset[Part]

    @contextmanager
    def running(self, folder: Path, model: str) -> Iterator["RunningVariant"]:
        """Starts it, with its files in `folder`, and stops it at the end. Raises BenchmarkFailed."""
        folder.mkdir()
        keys = folder / "keys.toml"
        keys.write_text(key_file(model, has_limits=Part.LIMITS in self.parts))
        settings = {"QUIRE_INSECURE": "1", "QUIRE_API_KEYS": str(keys), "QUIRE_GATEWAY_METRICS_PORT": "0"}
        if Part.TLS not in self.parts:
            with running_quire(self.title, settings) as deployment:
                yield RunningVariant(self, deployment, None)
            return
        authority = Authority(folder)
        for role in (ServiceRole.WORKER, ServiceRole.SCHEDULER, ServiceRole.GATEWAY):
            authority.issue_for(role)
        public = authority.issue("public", _HOST_NAMES)
        settings |= {"QUIRE_TLS_CERT_FILE": str(public.certificate), "QUIRE_TLS_KEY_FILE": str(public.key)}
        command = (sys.executable, "-m", "benchmarks.security.supervisor", str(folder))
        with running_quire(self.title, settings, supervisor=command) as deployment:
            yield RunningVariant(self, deployment, authority.certificate)


@dataclass(frozen=True)
class ProcessorSeconds:
    """Processor time that the services beside the worker have used since their start."""

    gateway: float
    scheduler: float


@dataclass(frozen=True)
class RunningVariant:
    """A variant that is ready. `ca` is the file of its CA's certificate; None: it has no TLS."""

    variant: Variant
    deployment: Deployment
    ca: Path | None

    def processor_seconds(self) -> ProcessorSeconds:
        """Until now. Raises BenchmarkFailed where a service does not export it."""
        assert self.deployment.gateway_metrics is not None
        pages = scrape(self.deployment.gateway_metrics), scrape(self.deployment.scheduler_metrics)
        return ProcessorSeconds(*(page["process_cpu_seconds_total", ""] for page in pages))

    @asynccontextmanager
    async def targets(self, protocol: Protocol) -> AsyncIterator[list[BenchTarget]]:
        """A target for each tenant, whose connections are closed at the end."""
        async with AsyncExitStack() as stack:
            targets: list[BenchTarget] = []
            for key in map(api_key, range(NUM_TENANTS)):
                if protocol is Protocol.GRPC:
                    credentials = None if self.ca is None else grpc.ssl_channel_credentials(self.ca.read_bytes())
                    client = AsyncClient(self.deployment.gateway, credentials=credentials, api_key=key)
                    targets.append(QuireTarget(await stack.enter_async_context(client)))
                else:
                    url = f"{'http' if self.ca is None else 'https'}://{self.deployment.http}"
                    http = http_client(url, key, None, None if self.ca is None else str(self.ca))
                    targets.append(OpenAITarget(url, await stack.enter_async_context(http)))
            yield targets


def make_variants(parts: Collection[Part]) -> tuple[Variant, Variant]:
    """The deployment without any of the parts, and the one with these."""
    return Variant(f"without {title_of(parts)}", frozenset()), Variant(f"with {title_of(parts)}", frozenset(parts))


def title_of(parts: Collection[Part]) -> str:
    """The parts in words."""
    return " and ".join("TLS" if part is Part.TLS else "limits" for part in parts)


def api_key(tenant: int) -> str:
    return f"benchmark-key-of-tenant-{tenant}"


def key_file(model: str, *, has_limits: bool) -> str:
    """A file of API keys, one for each tenant. The limits are those of `LIMITS`, which refuse nothing here."""
    limits = [f"{name} = {value}" for name, value in LIMITS.items()] + [f'models = ["{model}"]'] if has_limits else []
    tables = (
        ["[[keys]]", f'key = "{api_key(tenant)}"', f'tenant = "tenant-{tenant}"', *limits]
        for tenant in range(NUM_TENANTS)
    )
    return "".join(f"{line}\n" for table in tables for line in table)


LIMITS = {
    "max_priority": "1",
    "max_running": "64",
    "max_queued": "64",
    "max_kv_blocks": "4096",
    "tokens_per_minute": "1_000_000",
    "cached_token_factor": "0.5",
    "requests_per_minute": "6000",
    "expires": "2100-01-01T00:00:00Z",
    "retention": '"until_end"',
}
"""TOML values of a key's fields, besides `models`. `until_end` is the default for requests without a name."""
