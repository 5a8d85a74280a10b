"""Starts the gateway: `python -m gateway_svc --help`."""

import asyncio
import sys

import uvloop

from gateway_svc.auth import InvalidKeyFile
from gateway_svc.gateway import Gateway
from gateway_svc.settings import BadSetting, GatewaySettings
from gateway_svc.tokenizer import InvalidModelFiles
from svc_common.gc_tuning import freeze_gc
from svc_common.logs import configure_logging
from svc_common.models import ModelNotFound, ServedModel, resolve_model
from svc_common.server import CannotListen, run_until_signal
from svc_common.settings import read_settings
from svc_common.telemetry import configure_tracing, shutdown_tracing


async def serve(settings: GatewaySettings, model: ServedModel) -> None:
    """Runs until a signal."""
    gateway = Gateway(settings, model)
    await gateway.start()
    freeze_gc()
    await run_until_signal(gateway.stop)


def main() -> None:
    """Reads settings, runs, exits."""
    settings = read_settings(GatewaySettings)
    configure_logging("gateway", settings.log_level)
    configure_tracing("gateway")
    try:
        model = resolve_model(settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, model))
    except (InvalidKeyFile, InvalidModelFiles, BadSetting, CannotListen, ModelNotFound) as error:
        print(f"python -m gateway_svc: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
