"""gRPC within one process: the handlers of a server, called through a channel that has no port.

Both sides use their generated code. Messages are serialized as for a network, so that no value is shared.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, cast

import grpc

from svc_common.errors import QuireError

logger = logging.getLogger("quire.offline")

Handlers = Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
Serialize = Callable[[Any], bytes]
Deserialize = Callable[[bytes], Any]


class LocalServer:
    """The handlers of services, as the generated `add_…Servicer_to_server` register them."""

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    @property
    def registry(self) -> grpc.aio.Server:
        """What generated code adds a servicer to."""
        return cast(grpc.aio.Server, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Generated code registers each method in two ways; the other one is used."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to these handlers, whatever the address."""
        return cast(grpc.aio.Channel, _LocalChannel(self._handlers))


class _LocalChannel:
    """The part of grpc.aio.Channel that the stubs and clients of inner services use."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._calls: set[_LocalStream] = set()

    async def __aenter__(self) -> "_LocalChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the calls that run."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    def unary_unary(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **_: Any
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        return partial(_call, self._handlers[method], request_serializer, response_deserializer)

    def stream_stream(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **_: Any
    ) -> Callable[..., "_LocalStream"]:
        def start(metadata: object = None) -> _LocalStream:
            call = _LocalStream(self._handlers[method], request_serializer, response_deserializer)
            self._calls.add(call)
            return call

        return start


async def _call(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    serialize: Serialize,
    deserialize: Deserialize,
    request: object,
    *,
    timeout: float | None = None,
    metadata: object = None,
) -> Any:
    """A call with one response, within `timeout` seconds. Raises AioRpcError."""
    behavior = cast(Callable[[Any, _LocalContext], Coroutine[Any, Any, Any]], handler.unary_unary)
    try:
        async with asyncio.timeout(timeout):
            response = await behavior(_received(handler, serialize(request)), _LocalContext())
    except TimeoutError:
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within the timeout") from None
    except Exception as error:
        raise _error_of(error) from error
    return deserialize(_sent(handler, response))


class _LocalStream:
    """A call with streams in both directions. The handler runs in a task of its own."""

    def __init__(
        self, handler: "grpc.RpcMethodHandler[Any, Any]", serialize: Serialize, deserialize: Deserialize
    ) -> None:
        self._handler = handler
        self._serialize = serialize
        self._deserialize = deserialize
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._responses: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._error: grpc.aio.AioRpcError | None = None
        self._task = asyncio.create_task(self._run())

    async def write(self, request: object) -> None:
        """Raises InvalidStateError, as grpc does, where the call has ended."""
        if self._task.done():
            raise asyncio.InvalidStateError("the call has ended")
        self._requests.put_nowait(self._serialize(request))

    async def read(self) -> Any:
        """The next response, or EOF at the end. Raises AioRpcError where the call has failed."""
        data = await self._responses.get()
        if data is not None:
            return self._deserialize(data)
        self._responses.put_nowait(None)  # for the next read
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    def cancel(self) -> bool:
        return self._task.cancel()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self._error is None else self._error.code()

    async def details(self) -> str:
        return "" if self._error is None else self._error.details() or ""

    async def _run(self) -> None:
        behavior = cast(Callable[..., Any], self._handler.stream_stream)
        try:
            async with aclosing(behavior(self._received(), _LocalContext())) as responses:
                async for response in responses:
                    self._responses.put_nowait(_sent(self._handler, response))
        except asyncio.CancelledError:
            self._error = _error(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            self._error = _error_of(error)
        finally:
            self._responses.put_nowait(None)

    async def _received(self) -> AsyncIterator[Any]:
        while True:
            yield _received(self._handler, await self._requests.get())


class _Abort(Exception):  # noqa: N818
    """The end of a call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class _LocalContext:
    """The part of a ServicerContext that the handlers of inner services use."""

    def peer(self) -> str:
        return "this process"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> NoReturn:
        raise _Abort(code, details)


def _received(handler: "grpc.RpcMethodHandler[Any, Any]", data: bytes) -> Any:
    return cast(Deserialize, handler.request_deserializer)(data)


def _sent(handler: "grpc.RpcMethodHandler[Any, Any]", response: object) -> bytes:
    return cast(Serialize, handler.response_serializer)(response)


def _error_of(error: Exception) -> grpc.aio.AioRpcError:
    """What a call raises where its handler raised `error`. An unexpected error is logged."""
    match error:
        case _Abort():
            return _error(error.code, str(error))
        case QuireError():
            return _error(error.code, str(error))
    logger.error("a call within the process failed", exc_info=error)
    return _error(grpc.StatusCode.INTERNAL, "internal error")


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
