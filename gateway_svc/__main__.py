"""Starts the gateway: `python -m gateway_svc --help`."""

import asyncio
import sys

import uvloop

from gateway_svc.gateway import Gateway
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.settings import BadSetting, GatewaySettings
from gateway_svc.tokenizer import InvalidModelFiles
from svc_common.gc_tuning import freeze_gc
from svc_common.identity import InvalidCredentials
from svc_common.logs import configure_logging
from svc_common.model_settings import InvalidModelsFile
from svc_common.models import ModelNotFound
from svc_common.server import CannotListen, run_until_signal
from svc_common.settings import BAD_SETTINGS, read_settings
from svc_common.telemetry import configure_tracing, shutdown_tracing


async def serve(settings: GatewaySettings) -> None:
    gateway = Gateway(settings, ModelCatalog.load(settings.model_settings(), settings.max_logprobs, settings.seed))
    await gateway.start()
    freeze_gc()
    await run_until_signal(gateway.stop)


def main() -> None:
    settings = read_settings(GatewaySettings)
    configure_logging("gateway", settings.log_level)
    configure_tracing("gateway")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (
        InvalidModelFiles,
        InvalidModelsFile,
        BadSetting,
        CannotListen,
        InvalidCredentials,
        ModelNotFound,
    ) as error:
        print(f"python -m gateway_svc: {error}", file=sys.stderr)
        # A port may be free later.
        raise SystemExit(1 if isinstance(error, CannotListen) else BAD_SETTINGS) from None
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    main()
