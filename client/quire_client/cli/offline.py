"""`--offline`: models in the process of a command, where the services are installed beside the client."""

import importlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, Protocol, TypeVar, cast

import typer
from rich.console import Console

from quire_client.batch.transport import Transport
from quire_client.bench.targets import BenchTarget

T = TypeVar("T")
M = TypeVar("M")


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Compute the model in this process, without a server. --model is a directory, a GGUF file or a hub id; "
        "without it, that of QUIRE_MODEL, or the default one. Settings are the QUIRE_ variables of a server.",
    ),
]


class OfflineError(Exception):
    """A model that cannot be served in this process. The text is a message for users."""


class OfflineCommands(Protocol):
    """The module `quire_offline.commands`."""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """The result of `main`, on a new event loop."""

    def bench_target(self, model: str | None) -> AbstractAsyncContextManager[BenchTarget]:
        """Loads a model, and frees it at the end. Raises OfflineError."""

    def batch_transport(self, model: str | None) -> AbstractAsyncContextManager[Transport]:
        """Loads a model, and frees it at the end. Raises OfflineError."""


@asynccontextmanager
async def loading(model: AbstractAsyncContextManager[M]) -> AsyncIterator[M]:
    """A model, and on a terminal what is waited for until it is loaded."""
    async with AsyncExitStack() as stack:
        with Console(stderr=True).status("loading the model"):
            loaded = await stack.enter_async_context(model)
        yield loaded


def refuse_beside_offline(context: typer.Context, *names: str) -> None:
    """Raises BadParameter for an option on the command line that is about a server."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                "is about a server, and --offline needs none", param_hint=f"--{name.replace('_', '-')}"
            )


def offline_commands() -> OfflineCommands:
    """What commands need. Raises OfflineError where the services are not installed.

    It is loaded by name: the client does not import the services.
    """
    try:
        return cast(OfflineCommands, importlib.import_module("quire_offline.commands"))
    except ModuleNotFoundError as error:
        raise OfflineError(
            f"--offline needs the parts of a server, and there is no module {error.name}. "
            "In a clone of Quire: pip install --editable '.[local]'"
        ) from error
