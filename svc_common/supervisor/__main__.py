"""Starts everything on this machine: `make run`, or `python -m svc_common.supervisor --help`."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from svc_common.identity import InvalidCredentials
from svc_common.model_settings import InvalidModelsFile, ModelSettings
from svc_common.model_tasks import ModelTask
from svc_common.models import ModelNotFound
from svc_common.server import CannotListen
from svc_common.settings import read_settings
from svc_common.supervisor.addresses import Addresses, FreePorts, UnixAddress, assign
from svc_common.supervisor.console import Console
from svc_common.supervisor.deployment_secret import prepare_secret
from svc_common.supervisor.embedded_redis import EmbeddedRedis, RedisNotFound
from svc_common.supervisor.group import RoleGroup
from svc_common.supervisor.prepare import PrepareFailed, prepare_model
from svc_common.supervisor.roles import Role, redis_role, service_roles
from svc_common.supervisor.runner import RestartPolicy, RoleFailed
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.state_file import StateFile, StateFileUnusable

_REPORTED = (
    *(CannotListen, InvalidCredentials, InvalidModelsFile, ModelNotFound),
    *(RedisNotFound, PrepareFailed, StateFileUnusable),
)
"""Errors whose text is for the operator."""

Announce = Callable[[SupervisorSettings, Sequence[ModelSettings], Addresses], None]
"""Called when all roles are ready."""


async def supervise(
    settings: SupervisorSettings,
    console: Console,
    free_ports: FreePorts,
    change_role: Callable[[Role], Role] = lambda role: role,
    announce: Announce | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Runs all roles until a signal. `run` reports the errors that it raises.

    `change_role` is applied to each role but Redis before it starts. `begin` is called when a signal would end all in
    order, before anything starts, and `announce` when all are ready; None: addresses and an example are written to
    stdout.
    """
    announce = announce or (lambda *about: console.announce(ready_lines(*about)))
    models = settings.model_settings()
    for model in models:
        model.check()
    addresses = assign(settings, models, free_ports)
    addresses.check()
    if settings.redis_url:
        redis_url, stores = settings.redis_url.get_secret_value(), []
    else:
        redis = EmbeddedRedis.prepare(settings.run_dir, free_ports.take())
        redis_url, stores = redis.url, [redis_role(redis)]
    secret_file = prepare_secret(settings)
    constant = {
        "supervisor": os.getpid(),
        **addresses.to_json(),
        "redis_url": redis_url,
        "deployment_secret_file": None if secret_file is None else str(secret_file),
    }
    state_file = StateFile(settings.state_file, constant, console)
    services = service_roles(settings, models, addresses, redis_url, secret_file=secret_file)
    group = RoleGroup(
        [*stores, *map(change_role, services)],
        console,
        policy=RestartPolicy(),
        stop_seconds=settings.stop_seconds,
        on_change=state_file.update,
    )

    async def prepare() -> None:
        begin()
        state_file.create(group.snapshot())
        await prepare_models(models)

    try:
        await group.run(
            prepare=prepare,
            announce=lambda: announce(settings, models, addresses),
        )
    finally:
        state_file.remove()


async def prepare_models(models: Sequence[ModelSettings]) -> None:
    """Prepares the files of all models, one after another. Raises PrepareFailed."""
    for model in models:
        await prepare_model(model.environment)


def ready_lines(settings: SupervisorSettings, models: Sequence[ModelSettings], addresses: Addresses) -> list[str]:
    """A line with models and addresses, and an example call."""
    served = [model.names for model in models]
    listed = ", ".join(f"{name} (also {', '.join(aliases)})" if aliases else name for name, *aliases in served)
    http = ", ".join(http_urls(settings, addresses))
    grpc = ", ".join(listener.dial_address for listener in addresses.grpc)
    path, body = _example(models[0])
    insecurely = " --insecure" if settings.tls_cert_file else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    return [
        f"quire is ready: {listed} on {http} (OpenAI API) and {grpc} (gRPC)",
        f"  curl -N{insecurely} {_curl_target(settings, addresses)}{path}"
        f" -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'",
    ]


def http_urls(settings: SupervisorSettings, addresses: Addresses) -> list[str]:
    """The base URL of each gateway, or `unix:` and the path of its socket."""
    scheme = "https" if settings.tls_cert_file else "http"
    return [
        one.dial_address if isinstance(one, UnixAddress) else f"{scheme}://{one.dial_address}" for one in addresses.http
    ]


def _curl_target(settings: SupervisorSettings, addresses: Addresses) -> str:
    """Arguments with which curl calls the first gateway, up to the path."""
    first = addresses.http[0]
    if isinstance(first, UnixAddress):
        return f"--unix-socket {first.path} {'https' if settings.tls_cert_file else 'http'}://localhost"
    return http_urls(settings, addresses)[0]


def _example(model: ModelSettings) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it that this model answers."""
    question, name = "What is the capital of France?", model.names[0]
    match model.model_task:
        case ModelTask.EMBED:
            return "/v1/embeddings", {"model": name, "input": question}
        case ModelTask.SCORE:
            documents = ["Paris is the capital of France.", "Rome is the capital of Italy."]
            return "/rerank", {"model": name, "query": question, "documents": documents}
        case ModelTask.CLASSIFY:
            return "/classify", {"model": name, "input": question}
        case ModelTask.GENERATE:
            messages = [{"role": "user", "content": question}]
            return "/v1/chat/completions", {"model": name, "messages": messages, "stream": True}


def run(
    settings: SupervisorSettings,
    console: Console,
    announce: Announce | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Runs all roles until a signal, as `supervise` does. Errors are lines on stderr. Exits with 1 where a role cannot
    run.
    """
    errors = Console()
    try:
        with FreePorts() as free_ports:
            asyncio.run(supervise(settings, console, free_ports, announce=announce, begin=begin))
    except RoleFailed as error:
        errors.write_line(f"{error}; its last lines:")
        for line in error.last_lines:
            errors.relay(error.role, line)
        raise SystemExit(1) from None
    except _REPORTED as error:
        errors.write_line(str(error))
        raise SystemExit(1) from None


def main(args: list[str] | None = None) -> None:
    """Runs with flags, by default the process's own.

    Exits with 0 after a signal, 1 where a role cannot run, 2 on invalid settings.
    """
    run(read_settings(SupervisorSettings, args), Console())


if __name__ == "__main__":
    main()
