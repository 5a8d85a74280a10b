"""Starts the gateway: `python -m gateway_svc --help`."""

import asyncio
import sys

import uvloop

from gateway_svc.auth import BadKeyFile
from gateway_svc.gateway import Gateway
from gateway_svc.settings import GatewaySettings
from gateway_svc.tokenizer import BadModelFiles
from svc_common.garbage import settle_garbage
from svc_common.logs import configure_logging
from svc_common.models import ModelNotFound, ServedModel, resolve_model
from svc_common.server import CannotListen, run_until_signal
from svc_common.settings import read_settings
from svc_common.telemetry import configure_tracing, shutdown_tracing


async def serve(settings: GatewaySettings, model: ServedModel) -> None:
    """Runs until a signal."""
    gateway = Gateway(settings, model)
    await gateway.start()
    settle_garbage()
    await run_until_signal(gateway.stop)


def main() -> None:
    """Reads settings, runs, exits."""
    settings = read_settings(GatewaySettings)
    configure_logging("gateway", settings.log_level)
    configure_tracing("gateway")
    try:
        model = resolve_model(settings.model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, model))
    except (BadKeyFile, BadModelFiles, CannotListen, ModelNotFound) as error:
        print(f"python -m gateway_svc: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
