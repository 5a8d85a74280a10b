"""Admits calls of a gRPC server before a message is read, and limits the time for the message."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from svc_common.errors import QuireError, Reason
from svc_common.interceptors import Behavior, Context, Continuation, Handler, behavior_of, send_responses


class RequestGate(grpc.aio.ServerInterceptor):
    """Calls with one request message. grpc itself reads that message before it calls a handler, and waits for ever.

    A message that does not arrive within `seconds` is DEADLINE_EXCEEDED. The message of a call that `is_allowed`
    rejects is not read: the handler, which is to reject the call too, gets an empty one. `is_allowed` may also raise
    QuireError, which ends the call.
    """

    def __init__(
        self,
        seconds: float,
        is_allowed: Callable[[str, Context], bool],
        receive: Callable[[AsyncIterator[Any]], Awaitable[Any]] = anext,
    ) -> None:
        """`is_allowed` takes the method's full name and the context. `receive` reads the message, and may raise
        QuireError.
        """
        self._seconds = seconds
        self._receive = receive
        self._is_allowed = is_allowed

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method, behavior = handler_call_details.method, behavior_of(handler)
        parse: Callable[[bytes], Any] = handler.request_deserializer or bytes

        async def first(messages: AsyncIterator[Any], context: Context) -> Any:
            request = await self._read(messages) if self._is_allowed(method, context) else parse(b"")
            if isinstance(request, QuireError):  # what an inner interceptor's parser returns
                raise request
            return request

        # On the wire, a call with one message is a stream of one. The handler of a stream reads messages itself.
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else _stream_unary
        respond = _streaming(first, behavior) if handler.response_streaming else _unary(first, behavior)
        gated: Handler = make(respond, request_deserializer=parse, response_serializer=handler.response_serializer)
        return gated

    async def _read(self, messages: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._receive(messages)
        except TimeoutError:
            raise QuireError(Reason.DEADLINE_EXCEEDED, "the message did not arrive in time") from None
        except StopAsyncIteration:
            raise QuireError(Reason.MALFORMED_MESSAGE, "the call has no message") from None


class StreamGate(grpc.aio.ServerInterceptor):
    """Calls with a stream of request messages, which the handler reads: `check` is called before, and may raise
    QuireError. Handlers of responses are generators; messages pass without further work.
    """

    def __init__(self, check: Callable[[str, Context], object]) -> None:
        """`check` takes the method's full name and the context."""
        self._check = check

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        method, behavior = handler_call_details.method, behavior_of(handler)

        def respond(messages: AsyncIterator[Any], context: Context) -> Any:
            self._check(method, context)
            return behavior(messages, context)

        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else _stream_unary
        checked: Handler = make(
            respond,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return checked


_stream_unary: Callable[..., Handler] = grpc.stream_unary_rpc_method_handler


def _unary(first: Behavior, behavior: Behavior) -> Behavior:
    async def respond(messages: AsyncIterator[Any], context: Context) -> Any:
        return await behavior(await first(messages, context), context)

    return respond


def _streaming(first: Behavior, behavior: Behavior) -> Behavior:
    async def respond(messages: AsyncIterator[Any], context: Context) -> None:
        await send_responses(behavior(await first(messages, context), context), context)

    return respond
