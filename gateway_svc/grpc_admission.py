"""Counts the gRPC calls of tenants, from before a message is read until they end, and the bytes of their messages."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from gateway_svc.call_limits import CallLimits, OpenCall
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.refusals import Refusal, refusal_of
from gateway_svc.slow_messages import receive
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import TenantShares
from quire.inference.v1 import inference_pb2
from svc_common.errors import QuireError, Reason
from svc_common.interceptors import Behavior, Context, Continuation, Handler, behavior_of, maker_of, send_responses

_NO_TENANT = ""  # of calls that need no credential
_CANCEL = f"/{inference_pb2.DESCRIPTOR.services_by_name['InferenceService'].full_name}/Cancel"

_open_call: ContextVar[OpenCall | None] = ContextVar("open_call", default=None)
_message_bytes: ContextVar[int] = ContextVar("message_bytes", default=0)


def current_call() -> OpenCall | None:
    """What counts the call of this task; None: its caller has not logged in."""
    return _open_call.get()


def message_bytes() -> int:
    """The bytes of the message that this task, or the one that started it, read last.

    They are noted where it is parsed: to ask a message, protobuf writes it again, in 30 ms where it has 10 MB.
    """
    return _message_bytes.get()


class GrpcAdmission(grpc.aio.ServerInterceptor):
    """Calls end with QuireError where their tenant has too many in progress. Calls without a valid credential pass."""

    def __init__(
        self,
        login: Callable[[str, Context], Tenant | None],
        limits: CallLimits,
        slow_messages: TenantShares,
        metrics: GatewayMetrics,
    ) -> None:
        """`login` takes the method's full name and the context, and returns None for a call that is not counted.

        `slow_messages` are places of messages that take longer than a second.
        """
        self._login = login
        self._limits = limits
        self._slow_messages = slow_messages
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, behavior = handler_call_details.method, behavior_of(handler)
        counted = self._streaming(method, behavior) if handler.response_streaming else self._unary(method, behavior)
        parse = _noting_bytes(handler.request_deserializer or bytes)
        return maker_of(handler)(
            counted,
            # Of all calls, since RequestGate makes streams of those with one message.
            request_deserializer=_boxed(parse) if handler.request_streaming else parse,
            response_serializer=handler.response_serializer,
        )

    async def receive(self, messages: AsyncIterator[Any]) -> Any:
        """The message of a call that has one; its bytes are those of the call's body. Raises QuireError."""
        open_call = current_call()
        tenant = _NO_TENANT if open_call is None else open_call.body.tenant
        message = await receive(messages, self._slow_messages.share(tenant))
        if open_call is not None:
            open_call.body.add(message_bytes())
        return message

    def _unary(self, method: str, behavior: Behavior) -> Behavior:
        async def respond(request: Any, context: Context) -> Any:
            with self._counted(method, context):
                return await behavior(_taken(request), context)

        return respond

    def _streaming(self, method: str, behavior: Behavior) -> Behavior:
        async def respond(request: Any, context: Context) -> None:
            with self._counted(method, context):
                await send_responses(behavior(_taken(request), context), context)

        return respond

    @contextmanager
    def _counted(self, method: str, context: Context) -> Iterator[None]:
        """Counts a call among its tenant's, and where it is refused before its handler has its message, that, too."""
        try:
            with self._admitted(method, context):
                yield
        except QuireError as error:  # a handler ends its call with an abort, which is another exception
            is_late = error.reason is Reason.DEADLINE_EXCEEDED
            refusal = Refusal.TOO_LATE if is_late else refusal_of(error)
            if refusal is not None:
                self._metrics.refuse("grpc", refusal)
            raise

    @contextmanager
    def _admitted(self, method: str, context: Context) -> Iterator[None]:
        tenant = self._login(method, context)
        if tenant is None:
            yield
            return
        try:
            open_call = self._limits.begin(tenant, cancels=method == _CANCEL)
        except QuireError as error:
            with self._metrics.call("grpc", method.rpartition("/")[2], error.code.name):
                raise
        token = _open_call.set(open_call)
        try:
            yield
        finally:
            _open_call.reset(token)
            open_call.end()


class _Box:
    """A message until it is taken. grpc keeps what it has read last, as long as the call lasts: a message would take
    memory that does not count any longer.
    """

    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    def take(self) -> Any:
        message, self._message = self._message, None
        return message


class _TakenMessages:
    """The messages of a stream of boxes."""

    def __init__(self, boxes: AsyncIterator[_Box]) -> None:
        self._boxes = boxes

    def __aiter__(self) -> "_TakenMessages":
        return self

    async def __anext__(self) -> Any:
        return (await anext(self._boxes)).take()


def _boxed(parse: Callable[[bytes], Any]) -> Callable[[bytes], _Box]:
    return lambda data: _Box(parse(data))


def _taken(request: Any) -> Any:
    """What a handler is called with: one message as it is, or messages."""
    return _TakenMessages(request) if isinstance(request, AsyncIterator) else request


def _noting_bytes(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_and_note(data: bytes) -> Any:
        _message_bytes.set(len(data))
        return parse(data)

    return parse_and_note
