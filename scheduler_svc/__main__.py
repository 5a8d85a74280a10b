"""Starts the scheduler: `python -m scheduler_svc --help`."""

import asyncio
import logging
import os
import signal
import sys
import uuid
from functools import partial

import uvloop
from prometheus_client import REGISTRY

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from scheduler_svc.admin import AdminServicer, admin_server
from scheduler_svc.collector import EngineCollector
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.leader import Leader
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.encryption import NO_KEYS, RecordKeys, record_key_file
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.term import PartFailed
from scheduler_svc.worker_profiles import WorkerProfiles
from svc_common.files import ReloadedFile, keep_refreshed
from svc_common.gc_tuning import freeze_gc
from svc_common.identity import InvalidCredentials
from svc_common.inner_ports import check_dialled, create_inner_server, identity_of
from svc_common.logs import configure_logging
from svc_common.metrics import serve_metrics
from svc_common.server import (
    CannotListen,
    HealthReporter,
    bind,
    enable_reflection,
    run_until_signal,
)
from svc_common.service_roles import ServiceRole
from svc_common.settings import BAD_SETTINGS, read_settings
from svc_common.telemetry import configure_tracing, shutdown_tracing

log = logging.getLogger("quire.scheduler")

STORE = "store"
"""The health service that is SERVING while this scheduler records requests."""
WORKERS = "workers"
"""The health service that is SERVING while this scheduler leads and no worker is set apart."""


async def serve(settings: SchedulerSettings) -> None:
    """Runs until a signal, or until another scheduler has taken over."""
    identity = identity_of(ServiceRole.SCHEDULER, settings, [settings.host, settings.scheduler_admin_host])
    check_dialled(identity, settings.worker_addresses, "QUIRE_WORKERS_AT")
    keys = None if settings.record_keys_file is None else record_key_file(settings.record_keys_file)
    store = RedisStore(
        settings.redis_url.get_secret_value(),
        settings.record_ttl,
        settings.redis_prefix,
        settings.detach_grace,
        settings.redis_tls,
        NO_KEYS if keys is None else keys.current,
    )
    to_workers = identity.outbound(ServiceRole.WORKER)
    servicer, admin_servicer = SchedulerServicer(), AdminServicer(WorkerProfiles(to_workers))
    server = create_inner_server(identity)
    add_SchedulerServiceServicer_to_server(servicer, server)
    services = [scheduler_v1.DESCRIPTOR.services_by_name["SchedulerService"].full_name]
    health = HealthReporter(server, services)
    await health.set_one(STORE, False)
    await health.set_one(WORKERS, False)
    enable_reflection(server, services)
    port = bind(server, settings.host, settings.scheduler_port, identity.server_credentials())
    admin, admin_health, admin_port = admin_server(
        identity, admin_servicer, settings.scheduler_admin_host, settings.scheduler_admin_port
    )
    served = Served(servicer, admin_servicer, health)
    metrics = serve_metrics(settings.host, settings.scheduler_metrics_port, health, details=served.describe)

    leader = Leader(settings, store, uuid.uuid4().hex, served.lead, served.resign, to_workers)
    await server.start()
    await admin.start()
    await admin_health.set_serving(True)
    ports = {"port": port, "admin_port": admin_port, "metrics_port": metrics.port}
    log.info("ready", extra={**ports, "workers_at": settings.workers_at, "standby": settings.standby})
    refreshing = asyncio.create_task(keep_refreshed(*([] if keys is None else [partial(reload_keys, keys, store)])))
    leading = asyncio.create_task(leader.run())
    leading.add_done_callback(end_process)

    async def stop() -> None:
        leading.remove_done_callback(end_process)  # else it would signal the process before the handover is done
        await health.set_serving(False)
        if not leading.done():
            await leader.hand_over()
            await health.set_serving(False)  # `on_lead` may have set it meanwhile
        servicer.resign()
        leading.cancel()
        refreshing.cancel()
        await asyncio.gather(leading, refreshing, return_exceptions=True)
        await server.stop(grace=1)
        await admin.stop(grace=None)
        await store.close()
        metrics.close()

    await run_until_signal(stop)


def reload_keys(keys: ReloadedFile[RecordKeys], store: RedisStore) -> None:
    """Reads the file of record keys again if it has changed."""
    keys.refresh()
    store.record_keys = keys.current


class Served:
    """What this scheduler serves while it leads: sessions, the admin service, metrics, and health."""

    def __init__(self, servicer: SchedulerServicer, admin_servicer: AdminServicer, health: HealthReporter) -> None:
        self._servicer = servicer
        self._admin_servicer = admin_servicer
        self._health = health
        self._engine: SchedulerEngine | None = None
        self._collector: EngineCollector | None = None
        self._sending: asyncio.Task[None] | None = None
        self._resigned: str | None = None  # why the last term here ended, until the next one

    def describe(self) -> dict[str, object]:
        """What `/health` of the metrics port reports beside the status. Any thread may call it."""
        engine = self._engine
        apart = {} if engine is None else dict(engine.set_apart)
        return {
            "workers_set_apart": [{"worker": worker, "why": why} for worker, why in apart.items()],
            "resigned": self._resigned,
        }

    async def lead(self, engine: SchedulerEngine) -> None:
        """Serves from the engine of a term."""
        self._engine = engine
        self._resigned = None
        self._collector = EngineCollector(engine)
        REGISTRY.register(self._collector)
        engine.watch_status(partial(self._set_status, engine))
        self._servicer.lead(engine)
        self._admin_servicer.lead(engine)
        freeze_gc()
        await self._health.set_serving(True)

    async def resign(self, error: PartFailed) -> None:
        """Serves from no engine, since its term has failed."""
        self._engine = None
        self._resigned = str(error)
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
            self._collector = None
        self._servicer.resign()
        self._admin_servicer.resign(str(error))
        if self._sending is not None:
            await self._sending
        await self._health.set_serving(False)
        await self._send(is_recording=False, has_none_apart=False)

    def _set_status(self, engine: SchedulerEngine, status: scheduler_v1.Status) -> None:
        """Reports whether requests are recorded, and whether all workers can be used."""
        if engine is self._engine:
            send = self._send(is_recording=not status.is_store_degraded, has_none_apart=not engine.set_apart)
            self._sending = asyncio.create_task(send)

    async def _send(self, *, is_recording: bool, has_none_apart: bool) -> None:
        await self._health.set_one(STORE, is_recording)
        await self._health.set_one(WORKERS, has_none_apart)


def end_process(leading: asyncio.Task[None]) -> None:
    """Ends the process when another scheduler has taken over, so that it is started again."""
    if not leading.cancelled():
        if leading.exception() is not None:
            log.critical("a part of the scheduler failed", exc_info=leading.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    settings = read_settings(SchedulerSettings)
    configure_logging("scheduler", settings.log_level)
    configure_tracing("scheduler")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (CannotListen, InvalidCredentials) as error:
        print(f"python -m scheduler_svc: {error}", file=sys.stderr)
        # A port may be free later.
        raise SystemExit(1 if isinstance(error, CannotListen) else BAD_SETTINGS) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
