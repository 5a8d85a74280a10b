"""The errors that a client receives from a failed handler."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.inference.v1 import inference_pb2 as pb
from svc_common.errors import QuireError, Reason
from svc_common.server import bind, create_server

SECRET = "the prompt of another client"
GARBAGE = b"\xff" * 9

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def method(behavior: Callable[..., Any], *, streams: tuple[bool, bool] = (False, False)) -> Handler:
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams]
    return make(
        behavior,
        request_deserializer=pb.DetokenizeRequest.FromString,
        response_serializer=pb.DetokenizeResponse.SerializeToString,
    )


@asynccontextmanager
async def serving(
    methods: dict[str, Handler],
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = (),
) -> AsyncIterator[grpc.aio.Channel]:
    server = create_server(max_message_bytes=2**20, interceptors=interceptors)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", methods)])
    server.add_registered_method_handlers("test.Service", methods)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel, name: str, data: bytes, *, streams: tuple[bool, bool]) -> list[bytes]:
    """Raw bytes as request and response, for any kind of method."""
    path = f"/test.Service/{name}"

    async def requests() -> AsyncIterator[bytes]:
        yield data

    stub: Any
    match streams:
        case (False, False):
            stub = channel.unary_unary(path)
            return [await stub(data)]
        case (True, False):
            stub = channel.stream_unary(path)
            return [await stub(requests())]
        case (False, True):
            stub = channel.unary_stream(path)
            return [response async for response in stub(data)]
        case _:
            stub = channel.stream_stream(path)
            return [response async for response in stub(requests())]


def details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status()
    status.ParseFromString(metadata["grpc-status-details-bin"])
    return status


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    details_of(error).details[0].Unpack(info)
    assert info.domain == "quire"
    return str(info.reason)


async def unary(request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
    return respond(request)


async def client_streaming(requests: AsyncIterator[pb.DetokenizeRequest], context: Context) -> Any:
    return [respond(request) async for request in requests][-1]


async def server_streaming(request: pb.DetokenizeRequest, context: Context) -> AsyncIterator[Any]:
    yield respond(request)


async def both_streaming(requests: AsyncIterator[pb.DetokenizeRequest], context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        yield respond(request)


async def writing(request: pb.DetokenizeRequest, context: Context) -> None:
    await context.write(respond(request))


async def reading(requests: AsyncIterator[pb.DetokenizeRequest], context: Context) -> None:
    await context.write(respond(await context.read()))


def respond(request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    match request.model:
        case "fault":
            raise ValueError(SECRET)
        case "refusal":
            raise QuireError(Reason.INVALID_FIELD, "must be at least 1", field="stopping.max_tokens")
        case "busy":
            raise QuireError(Reason.CAPACITY_EXHAUSTED, "no capacity", retry_after=1.5)
    return pb.DetokenizeResponse(text="fine")


KINDS: dict[str, tuple[Callable[..., Any], tuple[bool, bool]]] = {
    "unary": (unary, (False, False)),
    "client_streaming": (client_streaming, (True, False)),
    "server_streaming": (server_streaming, (False, True)),
    "both_streaming": (both_streaming, (True, True)),
    "writing": (writing, (False, True)),
    "reading": (reading, (True, True)),
}


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    methods = {name: method(behavior, streams=streams) for name, (behavior, streams) in KINDS.items()}
    async with serving(methods) as channel:
        yield channel


@pytest.mark.parametrize("kind", KINDS)
async def test_a_good_call_passes(channel: grpc.aio.Channel, kind: str) -> None:
    responses = await call(channel, kind, b"", streams=KINDS[kind][1])
    assert responses == [pb.DetokenizeResponse(text="fine").SerializeToString()]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_becomes_internal_with_an_id_that_is_logged(
    channel: grpc.aio.Channel, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = pb.DetokenizeRequest(model="fault").SerializeToString()
    with caplog.at_level(logging.ERROR, "quire.boundary"), pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, kind, request, streams=KINDS[kind][1])
    error = raised.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert reason_of(error) == "INTERNAL"
    seen = f"{error.details()}{error.debug_error_string()}{error.trailing_metadata()}"
    assert SECRET not in seen
    assert "ValueError" not in seen
    # asyncio may log here that a call of an earlier test ended after that test's loop.
    (record,) = (one for one in caplog.records if one.name == "quire.boundary")
    assert vars(record)["error_id"] in (error.details() or "")
    assert vars(record)["method"] == f"/test.Service/{kind}"


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_do_not_parse_are_refused_without_the_parsers_words(
    channel: grpc.aio.Channel, kind: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, kind, GARBAGE, streams=KINDS[kind][1])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(raised.value) == "MALFORMED_MESSAGE"
    assert raised.value.details() == "the message does not parse"
    assert await call(channel, kind, b"", streams=KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_becomes_its_status_with_the_field_at_fault(channel: grpc.aio.Channel, kind: str) -> None:
    request = pb.DetokenizeRequest(model="refusal").SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, kind, request, streams=KINDS[kind][1])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(raised.value) == "INVALID_FIELD"
    bad_request = error_details_pb2.BadRequest()
    details_of(raised.value).details[1].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "stopping.max_tokens"


async def test_a_busy_server_sends_when_to_retry(channel: grpc.aio.Channel) -> None:
    request = pb.DetokenizeRequest(model="busy").SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, "unary", request, streams=(False, False))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    retry = error_details_pb2.RetryInfo()
    details_of(raised.value).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


async def test_an_answer_that_does_not_serialize_is_our_fault() -> None:
    async def wrong(request: object, context: Context) -> str:
        return SECRET

    async def wrong_stream(request: object, context: Context) -> AsyncIterator[str]:
        yield SECRET

    methods = {"Once": method(wrong), "Stream": method(wrong_stream, streams=(False, True))}
    async with serving(methods) as channel:
        for name, streams in (("Once", (False, False)), ("Stream", (False, True))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(channel, name, b"", streams=streams)
            assert raised.value.code() is grpc.StatusCode.INTERNAL
            assert reason_of(raised.value) == "INTERNAL"


async def test_what_a_handler_aborts_passes_as_it_is() -> None:
    async def abort(request: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    async with serving({"Abort": method(abort)}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, "Abort", b"", streams=(False, False))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "no such thing"


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, "NoSuch", b"", streams=(False, False))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_too_large_a_message_is_resource_exhausted(channel: grpc.aio.Channel) -> None:
    request = pb.DetokenizeRequest(model="x" * 2**20).SerializeToString()
    for kind, (_, streams) in KINDS.items():
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind, request, streams=streams)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def is_of_grpc(record: logging.LogRecord) -> bool:
    """grpc.aio's own poller finds its queue empty now and then, which asyncio logs; nothing is lost by that."""
    return record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage()


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_a_client_that_leaves_ends_the_handler(leave: str, caplog: pytest.LogCaptureFixture) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[pb.DetokenizeResponse]:
        try:
            started.set()
            while True:  # more than the flow-control window, so it ends during a write
                yield pb.DetokenizeResponse(text="x" * 10_000)
        finally:
            ended.set()

    responses = endless()  # referenced here, so that the interceptor ends it and not the garbage collector

    async with serving({"Endless": method(lambda request, context: responses, streams=(False, True))}) as channel:
        stub: Any = channel.unary_stream("/test.Service/Endless")
        # The call reaches the handler before its deadline, also on a slow machine.
        stream = stub(b"", timeout=3 if leave == "deadline" else None)
        await asyncio.wait_for(started.wait(), 60)
        if leave == "cancel":
            stream.cancel()
        await asyncio.wait_for(ended.wait(), 60)
    assert not [record for record in caplog.records if record.levelno > logging.INFO and not is_of_grpc(record)]
