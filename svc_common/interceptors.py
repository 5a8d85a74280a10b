"""The boundary of every gRPC server: errors leave as a status, never as an exception's text."""

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, cast

import grpc

from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.boundary")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behavior = Callable[[Any, "Context"], Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor. Handlers may be coroutines, or async generators, and raise QuireError.

    QuireError becomes its status with details, and with x-request-id in the trailing metadata; bytes that do not parse
    become MALFORMED_MESSAGE; any other exception is logged and becomes INTERNAL with an id that is in the log. Aborts
    and cancellation pass.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        behavior = behavior_of(handler)
        if handler.response_streaming:
            # Responses are serialized where they are written, inside the boundary.
            return _with_behavior(handler, _streaming(behavior, method), handler.response_serializer)
        return _with_behavior(handler, _unary(behavior, method, handler.response_serializer), None)


@asynccontextmanager
async def _guard(context: Context, method: str) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        # A write or read after the client has left: no fault. In most cases grpc cancels the handler instead.
        raise asyncio.CancelledError from None
    except QuireError as error:
        await error.abort(context, uuid.uuid4().hex)
    except Exception:
        error_id = uuid.uuid4().hex
        logger.exception("internal error", extra={"error_id": error_id, "method": method})
        await QuireError(Reason.INTERNAL, f"internal error {error_id}").abort(context, error_id)


async def send_responses(responses: Any, context: Context) -> None:
    """Sends what a handler of a streaming call has returned."""
    if inspect.isawaitable(responses):  # it writes to the context itself
        await responses
        return
    # Ends the handler at once when the call is cancelled in a write; grpc leaves that to the garbage collector.
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


def _unary(behavior: Behavior, method: str, serialize: Callable[[Any], bytes] | None) -> Behavior:
    async def respond(request: Any, context: Context) -> Any:
        async with _guard(context, method):
            if isinstance(request, QuireError):
                raise request
            response = await behavior(request, context)
            return serialize(response) if serialize else response

    return respond


def _streaming(behavior: Behavior, method: str) -> Behavior:
    async def respond(request: Any, context: Context) -> None:
        async with _guard(context, method):
            if isinstance(request, QuireError):
                raise request
            await send_responses(behavior(request, context), context)

    return respond


def _checked_parser(parse: Callable[[bytes], Any], *, streaming: bool) -> Callable[[bytes], Any]:
    """A parser whose errors become MALFORMED_MESSAGE.

    A streamed message is parsed where the handler reads it, so the error is raised. A single one is parsed
    before the handler is called, where grpc would send the error's text: there the parser returns the error.
    """

    def parse_or_refuse(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:
            error = QuireError(Reason.MALFORMED_MESSAGE, "the message does not parse")
            if streaming:
                raise error from None
            return error

    return parse_or_refuse


def behavior_of(handler: Handler) -> Behavior:
    """The function of a handler."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    # The stubs type the behaviors of synchronous servers only.
    return cast(Behavior, next(filter(None, kinds)))


def maker_of(handler: Handler) -> Callable[..., Handler]:
    """grpc's function that makes handlers of the same kind."""
    makers: dict[tuple[bool, bool], Callable[..., Handler]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[handler.request_streaming, handler.response_streaming]


def _with_behavior(handler: Handler, behavior: Behavior, serialize: Callable[[Any], bytes] | None) -> Handler:
    """The handler with another behavior and serializer, and a parser that does not raise."""
    parse = handler.request_deserializer
    if parse is not None:
        parse = _checked_parser(parse, streaming=handler.request_streaming)
    return maker_of(handler)(behavior, request_deserializer=parse, response_serializer=serialize)
