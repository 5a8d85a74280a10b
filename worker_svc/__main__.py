"""Starts a worker: `python -m worker_svc`."""

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import uvloop

from quire.worker.v1 import worker_pb2_grpc
from svc_common.gc_tuning import freeze_gc
from svc_common.identity import InvalidCredentials
from svc_common.inner_ports import create_inner_server, identity_of
from svc_common.logs import configure_logging
from svc_common.metrics import serve_metrics
from svc_common.models import ModelNotFound
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
from worker_svc.device_thread import DeviceThread
from worker_svc.errors import DeviceLost, RestartOrdered, StartupFailed
from worker_svc.host_memory import HostMemoryReader
from worker_svc.memory_monitor import MemoryMonitor, PressureLevels
from worker_svc.service import SERVICE_NAME, WorkerService
from worker_svc.settings import WorkerSettings

if TYPE_CHECKING:
    from worker_svc.step_runner import StepInstance

logger = logging.getLogger("quire.worker")

# How long calls may continue after the worker is drained or its grace period has passed.
_GRACE_SECONDS = 1.0


class _StoppedWhileLoading(Exception):  # noqa: N818
    """A signal came before the worker served. The thread that loads cannot be interrupted."""


async def serve(settings: WorkerSettings) -> None:
    """Serves until SIGTERM or SIGINT. Listens at once; SERVING when the model is loaded and warm.

    Raises _StoppedWhileLoading where that is not so yet.
    """
    identity = identity_of(ServiceRole.WORKER, settings, [settings.host])
    server = create_inner_server(identity)
    device = DeviceThread()
    memory = MemoryMonitor(
        HostMemoryReader(settings.memory_limit_bytes), PressureLevels(settings.memory_high, settings.memory_critical)
    )
    service = WorkerService(device, settings.profile_dir, memory)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    health = HealthReporter(server, [SERVICE_NAME])
    enable_reflection(server, [SERVICE_NAME])
    port = bind(server, settings.host, settings.worker_port, identity.server_credentials())
    metrics = serve_metrics(
        settings.host, settings.worker_metrics_port, health, details=lambda: {"memory": memory.describe()}
    )
    await server.start()

    async def load() -> None:
        instance = await device.run(partial(_load, settings))
        freeze_gc()
        memory.watch_parts(instance.memory.read)
        service.serve(instance)
        await health.set_serving(True)
        logger.info("ready", extra={"port": port, "metrics_port": metrics.port, **_summary(instance)})

    async def stop() -> None:
        await health.set_serving(False)
        if not loading.done():
            raise _StoppedWhileLoading
        logger.info("draining", extra={"seconds": settings.drain_grace})
        with suppress(TimeoutError):  # what still runs continues on another worker, from its last committed token
            async with asyncio.timeout(settings.drain_grace):
                await service.drain()
        await server.stop(_GRACE_SECONDS)

    loading, stopped = asyncio.create_task(load()), asyncio.create_task(run_until_signal(stop))
    device_lost = asyncio.create_task(service.device_lost.wait())
    restart_ordered = asyncio.create_task(service.restart_ordered.wait())
    try:
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # raises where loading failed
        if stopped.done():
            stopped.result()  # raises where a signal came before
        await asyncio.wait({stopped, device_lost, restart_ordered}, return_when=asyncio.FIRST_COMPLETED)
        if device_lost.done():
            raise DeviceLost("the device failed in a step")
        if restart_ordered.done():
            await server.stop(_GRACE_SECONDS)  # the order is answered before the process ends
            raise RestartOrdered("the scheduler that leads has ordered it")
    finally:
        is_loading = not loading.done()
        for task in (loading, stopped, device_lost, restart_ordered):
            task.cancel()
        await server.stop(0)
        memory.close()
        if not is_loading:
            device.close()
        metrics.close()


def _load(settings: WorkerSettings) -> "StepInstance":
    # Imports torch, which takes seconds. The server answers by now, and errors in settings are reported already.
    from worker_svc.load import load_model

    return load_model(settings, logger.info)


def _summary(instance: "StepInstance") -> dict[str, object]:
    description = instance.description
    num_blocks = description.limits.num_blocks
    return {
        "model": description.model,
        "dtype": description.dtype,
        "device": description.device,
        "blocks": num_blocks,
        "block_size": description.limits.block_size,
        "kv_bytes": num_blocks * description.block_bytes,
        "swap_bytes": description.limits.num_host_blocks * description.block_bytes,
    }


def _exit_without_threads() -> NoReturn:
    """Ends the process beside a thread that still runs: libraries' own clean-up at the end would take their state from
    under it.
    """
    shutdown_tracing()
    logging.shutdown()
    os._exit(0)


def main() -> None:
    settings = read_settings(WorkerSettings)
    configure_logging("worker", settings.log_level)
    configure_tracing("worker")
    try:
        uvloop.run(serve(settings))
    except _StoppedWhileLoading:
        logger.info("stopped while the model was loading")
        _exit_without_threads()
    except (DeviceLost, RestartOrdered) as error:
        logger.critical("exiting, to be restarted: %s", error)
        raise SystemExit(1) from None
    except (StartupFailed, CannotListen, InvalidCredentials, ModelNotFound) as error:
        logger.error("cannot start: %s", error)
        # A port may be free later.
        raise SystemExit(1 if isinstance(error, CannotListen) else BAD_SETTINGS) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
