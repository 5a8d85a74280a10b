"""What the `quire` command does with a model in its own process. The client loads this module by name, since it does
not import the services (quire_client/cli/offline.py)."""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

from gateway_svc.settings import BadSetting
from gateway_svc.tokenizer import InvalidModelFiles
from quire_client.cli.offline import OfflineError
from quire_offline.bench_target import EngineTarget
from quire_offline.engine import OfflineEngine
from quire_offline.errors import client_error
from quire_offline.http_transport import EngineTransport
from quire_offline.settings import OfflineSettings
from svc_common.errors import QuireError as ServedError
from svc_common.models import ModelNotFound
from worker_svc.errors import StartupFailed

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, on an event loop such as those of the services."""
    return uvloop.run(main)


@asynccontextmanager
async def bench_target(model: str | None) -> AsyncIterator[EngineTarget]:
    """A model for `quire bench`. None: that of QUIRE_MODEL, or the default one. Raises OfflineError."""
    async with _engine(model) as engine:
        yield EngineTarget(engine)


@asynccontextmanager
async def batch_transport(model: str | None) -> AsyncIterator[EngineTransport]:
    """A model for `quire batch`, as for `bench_target`."""
    async with _engine(model) as engine:
        transport = EngineTransport(engine)
        try:
            yield transport
        finally:
            transport.close()


@asynccontextmanager
async def _engine(model: str | None) -> AsyncIterator[OfflineEngine]:
    try:
        engine = await OfflineEngine.start(OfflineSettings.of({"model": model}))
    except (BadSetting, InvalidModelFiles, ModelNotFound, StartupFailed, ValueError) as error:
        raise OfflineError(str(error)) from error
    except ServedError as error:
        raise client_error(error) from None
    try:
        yield engine
    finally:
        await engine.close()
