"""Starts the scheduler: `python -m scheduler_svc --help`."""

import asyncio
import logging
import os
import signal
import sys

import uvloop
from prometheus_client import REGISTRY

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from scheduler_svc.admin import admin_server
from scheduler_svc.collector import EngineCollector
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.records import Records, RecordWriter
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_link import WorkerPool
from svc_common.garbage import settle_garbage
from svc_common.logs import configure_logging
from svc_common.metrics import serve_metrics
from svc_common.server import (
    INNER_MESSAGE_BYTES,
    INNER_OPTIONS,
    CannotListen,
    HealthReporter,
    bind,
    create_server,
    enable_reflection,
    run_until_signal,
)
from svc_common.settings import read_settings
from svc_common.telemetry import configure_tracing, shutdown_tracing

log = logging.getLogger("quire.scheduler")


async def serve(settings: SchedulerSettings) -> None:
    """Run until a signal."""
    records = Records(settings.redis_url, settings.record_ttl)
    writer = RecordWriter(records)
    engine = Engine(Scheduler(settings.limits), writer, settings.detach_grace)
    server = create_server(max_message_bytes=INNER_MESSAGE_BYTES, options=INNER_OPTIONS)
    add_SchedulerServiceServicer_to_server(SchedulerServicer(engine, records), server)
    services = [scheduler_v1.DESCRIPTOR.services_by_name["SchedulerService"].full_name]
    health = HealthReporter(server, services)
    enable_reflection(server, services)
    port = bind(server, settings.host, settings.scheduler_port)
    admin, admin_health, admin_port = admin_server(engine, settings.scheduler_admin_host, settings.scheduler_admin_port)
    REGISTRY.register(EngineCollector(engine, records))
    metrics = serve_metrics(settings.host, settings.scheduler_metrics_port)
    await server.start()
    await admin.start()
    tasks = [
        asyncio.create_task(work)
        for work in (
            writer.run(),
            engine.watch_deadlines(),
            WorkerPool(engine, settings.worker_addresses).run(),
            renew_records(engine, records, settings.record_ttl / 3),
        )
    ]
    for task in tasks:
        task.add_done_callback(exit_on_failure)
    settle_garbage()
    await health.set_serving(True)
    await admin_health.set_serving(True)
    ports = {"port": port, "admin_port": admin_port, "metrics_port": metrics.port}
    log.info("ready", extra={**ports, "workers_at": settings.workers_at})

    async def stop() -> None:
        await health.set_serving(False)
        await server.stop(grace=1)
        await admin.stop(grace=None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await writer.flush()
        await records.close()
        metrics.close()

    await run_until_signal(stop)


async def renew_records(engine: Engine, records: Records, seconds: float) -> None:
    """Keep the records of live requests from expiring, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        await records.renew(list(engine.core.keys))


def exit_on_failure(task: asyncio.Task[None]) -> None:
    """End the process where one of its loops did: better started anew than half alive."""
    if not task.cancelled():
        log.critical("a loop of the scheduler ended", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Read settings, run, exit."""
    settings = read_settings(SchedulerSettings)
    configure_logging("scheduler", settings.log_level)
    configure_tracing("scheduler")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except CannotListen as error:
        print(f"python -m scheduler_svc: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
