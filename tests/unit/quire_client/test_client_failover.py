"""Both clients against gateways that fail at every message: each token arrives once, or the error gives the reason."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import pytest

from breaking_gateways import (
    LENGTHS,
    Break,
    BreakingGateway,
    Fault,
    Refusal,
    breaking_gateways,
    text_after,
    token,
)
from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, AsyncStream, Chunk, Client, QuireError, Stream

Kind = Literal["aio", "sync"]
Open = Callable[[Any], Any]

# Messages of the failing gateway, which sends two tokens at a time: acceptance, chunks, usage.
NUM_MESSAGES = 1 + sum(-(-length // 2) for length in LENGTHS) + 1


@dataclass
class Read:
    """The chunks and failures that a client received."""

    stream: AsyncStream | Stream
    chunks: list[Chunk] = field(default_factory=list)
    broken_by: list[QuireError] = field(default_factory=list)


@pytest.fixture(params=["aio", "sync"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def pair() -> AsyncIterator[list[BreakingGateway]]:
    """Two gateways with different chunk sizes."""
    async with breaking_gateways(2, 3) as gateways:
        yield gateways


def soon(awaitable: Any) -> Any:
    """A timeout for waits, so that a test fails instead of hanging."""
    return asyncio.wait_for(awaitable, 60)


def address(gateways: list[BreakingGateway]) -> str:
    return ",".join(gateway.address for gateway in gateways)


async def use(kind: Kind, to: str, open_call: Open, patience: float = 20) -> Any:
    """The result of `open_call`: a response, or a complete stream."""
    if kind == "aio":
        async with AsyncClient(to, resume_patience=patience) as client:
            opened = open_call(client)
            return await soon(opened if asyncio.iscoroutine(opened) else opened.collect())

    def run() -> Any:
        with Client(to, resume_patience=patience) as client:
            opened = open_call(client)
            return opened.collect() if isinstance(opened, Stream) else opened

    return await soon(asyncio.to_thread(run))


async def read(kind: Kind, to: str, **options: Any) -> Read:
    """Reads a stream chunk by chunk."""
    broken_by: list[QuireError] = []
    if kind == "aio":
        async with AsyncClient(to) as client:
            stream = client.stream("x", on_resume=broken_by.append, **options)
            return Read(stream, [chunk async for chunk in stream], broken_by)

    def run() -> Read:
        with Client(to) as client:
            stream = client.stream("x", on_resume=broken_by.append, **options)
            return Read(stream, list(stream), broken_by)

    return await asyncio.to_thread(run)


def check_whole(chunks: list[Chunk]) -> None:
    """Asserts each token once, in order, with its text and one end."""
    for index, length in enumerate(LENGTHS):
        mine = [chunk for chunk in chunks if chunk.index == index]
        place = 0
        for chunk in mine:
            assert chunk.offset == place
            place += len(chunk.token_ids)
        assert [t for chunk in mine for t in chunk.token_ids] == [token(index, place) for place in range(length)]
        assert "".join(chunk.text for chunk in mine) == text_after(index, length, is_ended=True)
        assert [chunk.finish is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize("how", [Fault.DRAINS, Fault.RESETS, Fault.STOPS])
@pytest.mark.parametrize("after", range(NUM_MESSAGES))
async def test_a_stream_is_resumed_at_another_gateway(
    kind: Kind, pair: list[BreakingGateway], after: int, how: Fault
) -> None:
    first, second = pair
    first.breaks = [Break(after, how)]

    received = await soon(read(kind, address(pair)))

    check_whole(received.chunks)
    assert received.stream.usage is not None
    assert received.stream.usage.completion_tokens == sum(LENGTHS)
    (began,), (went_on,) = first.asked, second.asked
    assert isinstance(began, pb.StreamGenerateRequest)
    # It may not have been accepted. gRPC drops what has arrived and was not read when a connection is closed.
    if after == 0 or (how is Fault.STOPS and isinstance(went_on, pb.StreamGenerateRequest)):
        assert went_on == began
    else:
        assert isinstance(went_on, pb.ResumeRequest)
        assert went_on.request_id == began.generation.request_id


@pytest.mark.parametrize("how", [Fault.DRAINS, Fault.RESETS])
async def test_a_stream_is_resumed_at_the_same_gateway_after_each_break(
    kind: Kind, pair: list[BreakingGateway], how: Fault
) -> None:
    first = pair[0]
    first.breaks = [Break(after, how) for after in (1, 1, 2, 1, 3, 1)]

    received = await soon(read(kind, first.address))

    check_whole(received.chunks)
    # A second failure without progress in between counts as the same failure.
    assert received.stream.num_resumes == len(received.broken_by) == 3
    assert len(first.asked) == 7


async def test_on_resume_is_called_with_the_error_of_a_break(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(3, Fault.DRAINS)]

    received = await soon(read(kind, address(pair)))

    assert [error.reason for error in received.broken_by] == ["DRAINING"]
    assert received.stream.num_resumes == 1


async def test_a_break_after_the_last_message_is_ignored(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(NUM_MESSAGES, Fault.DRAINS)]

    received = await soon(read(kind, address(pair)))

    check_whole(received.chunks)
    assert received.stream.num_resumes == 0


async def test_a_gateway_that_hangs_is_left(
    kind: Kind, pair: list[BreakingGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aio_endpoints", "sync_endpoints"):
        monkeypatch.setattr(f"quire_client.{module}.KEEPALIVE_SECONDS", 0.2)
        monkeypatch.setattr(f"quire_client.{module}.PROBE_SECONDS", 0.3)
    pair[0].breaks = [Break(3, Fault.HANGS)]

    received = await soon(read(kind, address(pair)))

    check_whole(received.chunks)
    assert received.broken_by[0].reason == "UNREACHABLE"


async def test_a_unary_request_to_a_gateway_that_hangs_is_sent_to_another(
    kind: Kind, pair: list[BreakingGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aio_endpoints", "sync_endpoints"):
        monkeypatch.setattr(f"quire_client.{module}.KEEPALIVE_SECONDS", 0.2)
        monkeypatch.setattr(f"quire_client.{module}.PROBE_SECONDS", 0.3)
    pair[1].breaks = [Break(0, Fault.DRAINS)]  # so that one gateway has answered before the other one is silent
    pair[0].breaks = [Break(0, Fault.HANGS)]

    answer = await use(kind, address(pair[::-1]), lambda client: client.generate("x"))

    assert answer.text == "whole"
    assert len({str(request) for gateway in pair for request in gateway.asked}) == 1


async def test_a_silent_gateway_that_answers_probes_is_waited_for(
    kind: Kind, pair: list[BreakingGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aio_endpoints", "sync_endpoints"):
        monkeypatch.setattr(f"quire_client.{module}.KEEPALIVE_SECONDS", 0.1)
        monkeypatch.setattr(f"quire_client.{module}.PROBE_SECONDS", 60)
    pair[0].breaks = [Break(3, Fault.PAUSES)]

    received = await soon(read(kind, address(pair)))

    check_whole(received.chunks)
    assert [error.reason for error in received.broken_by] == ["DRAINING"]


async def test_a_gateway_that_comes_back_is_found_again(kind: Kind, pair: list[BreakingGateway]) -> None:
    first = pair[0]
    first.breaks = [Break(3, Fault.STOPS)]
    port = int(first.address.rpartition(":")[2])

    async def come_back() -> None:
        while first._stopping is None:
            await asyncio.sleep(0.01)
        await first._stopping
        await first.start(port)

    coming = asyncio.create_task(come_back())
    received = await soon(read(kind, first.address))
    await coming

    check_whole(received.chunks)


async def test_calls_stay_with_the_gateway_that_answered(kind: Kind, pair: list[BreakingGateway]) -> None:
    first, second = pair
    first.breaks = [Break(2, Fault.DRAINS)]
    if kind == "aio":
        async with AsyncClient(address(pair)) as client:
            await client.stream("x").collect()
            await client.stream("y").collect()
    else:

        def run() -> None:
            with Client(address(pair)) as client:
                client.stream("x").collect()
                client.stream("y").collect()

        await soon(asyncio.to_thread(run))

    assert (len(first.asked), len(second.asked)) == (1, 2)


@pytest.mark.parametrize("how", [Fault.DRAINS, Fault.STOPS])
async def test_a_unary_request_is_sent_again_under_its_name(
    kind: Kind, pair: list[BreakingGateway], how: Fault
) -> None:
    pair[0].breaks = [Break(0, how)]

    answer = await use(kind, address(pair), lambda client: client.generate("x"))

    assert answer.text == "whole"
    assert pair[0].asked == pair[1].asked
    (request,) = pair[0].asked
    assert isinstance(request, pb.GenerateRequest)
    assert request.generation.request_id


async def test_an_expired_request_fails_with_request_unknown(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(3, Fault.DRAINS)]
    pair[1].known = set()

    with pytest.raises(QuireError) as caught:
        await soon(read(kind, address(pair)))

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (grpc.StatusCode.INTERNAL, "REQUEST_QUARANTINED"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA_EXCEEDED"),
    ],
)
async def test_permanent_errors_are_raised_at_once(
    kind: Kind, pair: list[BreakingGateway], code: grpc.StatusCode, reason: str, after: int
) -> None:
    pair[0].breaks = [Break(after, Refusal(code, reason))]

    with pytest.raises(QuireError) as caught:
        await soon(read(kind, address(pair)))

    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert (len(pair[0].asked), pair[1].asked) == (1, [])


async def test_the_last_error_is_raised_after_resume_patience(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(0, Fault.DRAINS)] * 1000

    with pytest.raises(QuireError) as caught:
        await use(kind, pair[0].address, lambda client: client.stream("x"), patience=0.3)

    assert caught.value.reason == "DRAINING"


async def test_the_deadline_is_that_of_all_calls_together(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(1, Fault.DRAINS)] * 1000

    with pytest.raises(QuireError) as caught:
        await use(kind, pair[0].address, lambda client: client.stream("x", timeout=1.5))

    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(pair[0].asked) > 1


async def test_without_resuming_a_break_is_an_error(kind: Kind, pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(3, Fault.DRAINS)]

    with pytest.raises(QuireError) as caught:
        await soon(read(kind, address(pair), resume=False))

    assert caught.value.reason == "DRAINING"
    assert pair[1].asked == []


async def test_a_named_request_is_taken_up_by_another_client(kind: Kind, pair: list[BreakingGateway]) -> None:
    await soon(read(kind, pair[0].address, request_id="mine"))

    whole = await use(kind, pair[1].address, lambda client: client.resume("mine"))
    rest = await use(kind, pair[1].address, lambda client: client.resume("mine", {0: 5, 1: 4}))

    assert [len(sequence.token_ids) for sequence in whole.completions] == list(LENGTHS)
    assert [len(sequence.token_ids) for sequence in rest.completions] == [2, 0]
    assert rest.completions[0].text == text_after(0, 7, is_ended=True).removeprefix(text_after(0, 5, is_ended=False))


async def test_a_stream_that_is_closed_while_gateways_are_away_makes_no_more_calls(pair: list[BreakingGateway]) -> None:
    pair[0].breaks = [Break(3, Fault.STOPS)]
    broken = asyncio.Event()
    async with AsyncClient(pair[0].address) as client:
        stream = client.stream("x", on_resume=lambda error: broken.set())
        reading = asyncio.create_task(stream.collect())
        await soon(broken.wait())
        await stream.aclose()
        with pytest.raises(QuireError) as caught:
            await soon(reading)

    assert (caught.value.code, caught.value.message) == (grpc.StatusCode.CANCELLED, "the stream was closed")


async def test_the_servers_hint_is_waited_for_until_the_client_is_closed(
    kind: Kind, pair: list[BreakingGateway]
) -> None:
    later = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CAPACITY_EXHAUSTED", retry_after=2)
    for gateway in pair:
        gateway.breaks = [Break(0, later)]
    client = (AsyncClient if kind == "aio" else Client)(address(pair))

    if isinstance(client, AsyncClient):
        reading = asyncio.create_task(client.stream("x").collect())
    else:
        reading = asyncio.create_task(asyncio.to_thread(client.stream("x").collect))
    while not all(gateway.asked for gateway in pair):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # some of the time in which it would call again without a hint
    await soon(client.aclose() if isinstance(client, AsyncClient) else asyncio.to_thread(client.close))
    with pytest.raises(QuireError) as caught:
        await soon(reading)

    assert (caught.value.code, caught.value.message) == (grpc.StatusCode.CANCELLED, "the client was closed")
    generates = [request for gateway in pair for request in gateway.asked if not isinstance(request, pb.CancelRequest)]
    assert len(generates) == 2


async def test_a_request_that_is_left_is_cancelled_where_it_runs_by_now(
    kind: Kind, pair: list[BreakingGateway]
) -> None:
    pair[0].breaks = [Break(2, Fault.STOPS)]

    async def advance_from() -> None:
        async with AsyncClient(address(pair)) as client, client.stream("x") as stream:
            async for _ in stream:
                if stream.num_resumes:
                    break

    def leave_blocking() -> None:
        with Client(address(pair)) as client:
            stream = client.stream("x")
            for _ in stream:
                if stream.num_resumes:
                    break

    await soon(advance_from() if kind == "aio" else asyncio.to_thread(leave_blocking))

    went_on, cancel = pair[1].asked
    assert isinstance(went_on, pb.ResumeRequest)
    assert isinstance(cancel, pb.CancelRequest)
    assert cancel.request_id == went_on.request_id


async def test_the_first_of_several_addresses_need_not_be_there(kind: Kind, pair: list[BreakingGateway]) -> None:
    await pair[0].stop()

    check_whole((await soon(read(kind, address(pair)))).chunks)
    assert await use(kind, address(pair), lambda client: client.models()) == ()
