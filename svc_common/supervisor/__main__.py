"""Starts everything on this machine: `python -m svc_common.supervisor --help`."""

import asyncio
import json
import os
from typing import Any

from svc_common.models import ModelNotFound, find_source, find_tokenizer
from svc_common.server import CannotListen
from svc_common.settings import read_settings
from svc_common.supervisor.addresses import Addresses, assign, free_port
from svc_common.supervisor.console import Console
from svc_common.supervisor.embedded_redis import EmbeddedRedis, RedisNotFound
from svc_common.supervisor.group import RoleGroup
from svc_common.supervisor.prepare import PrepareFailed, prepare_model
from svc_common.supervisor.roles import redis_role, service_roles
from svc_common.supervisor.runner import RestartPolicy, RoleFailed
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.state import StateFile


async def supervise(settings: SupervisorSettings, console: Console) -> None:
    """Runs until a signal. What it raises where that cannot be is told by `main`."""
    find_source(settings.model, settings.revision)
    find_tokenizer(settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision)
    addresses = assign(settings)
    addresses.check()
    if settings.redis_url:
        redis_url, stores = settings.redis_url, []
    else:
        redis = EmbeddedRedis.prepare(settings.run_dir, free_port())
        redis_url, stores = redis.url, [redis_role(redis)]
    state = StateFile(settings.state_file, describe(addresses, redis_url)) if settings.state_file else None
    group = RoleGroup(
        [*stores, *service_roles(settings, addresses, redis_url)],
        console,
        policy=RestartPolicy(),
        stop_seconds=settings.stop_seconds,
        on_change=state.write if state else lambda snapshot: None,
    )
    try:
        await group.run(
            prepare=lambda: prepare_model(settings.model_environment),
            announce=lambda: console.announce(ready_lines(settings, addresses)),
        )
    finally:
        if state:
            state.remove()


def describe(addresses: Addresses, redis_url: str) -> dict[str, Any]:
    """What the state file tells of addresses, as `host:port`; element i of a list is gateway, scheduler or worker i."""
    return {
        "supervisor": os.getpid(),
        "http": [listener.dial_address for listener in addresses.http],
        "grpc": [listener.dial_address for listener in addresses.grpc],
        "schedulers": [listener.dial_address for listener in addresses.schedulers],
        "scheduler_admin": [listener.dial_address for listener in addresses.scheduler_admin],
        "scheduler_metrics": [listener.dial_address for listener in addresses.scheduler_metrics],
        "workers": [listener.dial_address for listener in addresses.workers],
        "worker_metrics": [listener.dial_address for listener in addresses.worker_metrics],
        "redis_url": redis_url,
    }


def ready_lines(settings: SupervisorSettings, addresses: Addresses) -> list[str]:
    """One line that says where everything is, and a call to try."""
    model = find_source(settings.model).name
    http = ", ".join(f"http://{listener.dial_address}" for listener in addresses.http)
    grpc = ", ".join(listener.dial_address for listener in addresses.grpc)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    return [
        f"quire is ready: {model} on {http} (OpenAI API) and {grpc} (gRPC)",
        f"  curl -N http://{addresses.http[0].dial_address}/v1/chat/completions"
        f" -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'",
    ]


def main() -> None:
    """Read settings, run, exit: 0 after a signal, 1 where it could not run, 2 on bad settings."""
    settings = read_settings(SupervisorSettings)
    console = Console()
    try:
        asyncio.run(supervise(settings, console))
    except RoleFailed as error:
        console.write_line(f"{error}; its last lines:")
        for line in error.last_lines:
            console.relay(error.role, line)
        raise SystemExit(1) from None
    except (CannotListen, ModelNotFound, RedisNotFound, PrepareFailed) as error:
        console.write_line(str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
