"""The blocking client against a real server, from another thread than the server's."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest

from quire.inference.v1 import inference_pb2 as pb
from quire_client import Client, FinishReason, Message, QuireError, Stream

T = TypeVar("T")


async def with_client(address: str, use: Callable[[Client], T]) -> T:
    def run() -> T:
        with Client(address) as client:
            return use(client)

    return await asyncio.wait_for(asyncio.to_thread(run), 60)


async def test_a_stream_yields_chunks_between_acceptance_and_usage(address: str, service: Any) -> None:
    service.answer("The", " capital")

    def use(client: Client) -> tuple[list[str], Stream]:
        stream = client.stream("What?")
        return [chunk.text for chunk in stream], stream

    texts, stream = await with_client(address, use)

    assert texts == ["The", " capital", ""]
    assert stream.acceptance is not None
    assert stream.acceptance.seed == 7
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 2


async def test_a_chat_is_streamed_and_collected(address: str, service: Any) -> None:
    service.answer("Par", "is.")

    generation = await with_client(address, lambda client: client.stream_chat([Message("user", "Capital?")]).collect())

    assert (generation.text, generation.finish_reason) == ("Paris.", FinishReason.LENGTH)
    assert service.requests[0].generation.chat.messages[0].content == "Capital?"


async def test_generate_and_chat_answer_with_the_whole(address: str, service: Any) -> None:
    service.whole = pb.GenerateResponse(completions=[pb.Completion(text="Paris.")])

    assert (await with_client(address, lambda client: client.generate([1, 2], max_tokens=3))).text == "Paris."
    assert (await with_client(address, lambda client: client.chat([Message("user", "?")]))).text == "Paris."
    assert list(service.requests[0].generation.token_ids.ids) == [1, 2]


async def test_the_smaller_calls(address: str, service: Any) -> None:
    assert (await with_client(address, lambda client: client.tokenize("a text"))).token_ids == (4, 5)
    assert await with_client(address, lambda client: client.detokenize([4, 5])) == "so it says"
    assert (await with_client(address, lambda client: client.models()))[0].name == "tiny"
    assert (await with_client(address, lambda client: client.embed("a text"))).vectors == ((0.0, 0.5),)
    assert (await with_client(address, lambda client: client.score("a query", "a document"))).scores == (0.5,)
    await with_client(address, lambda client: client.cancel("r-1"))

    assert service.requests[-1].request_id == "r-1"


async def test_a_refusal_names_reason_and_field(address: str, service: Any) -> None:
    service.refuse_with_details(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "must be above 0", "n")
    service.refuse_with_details(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no such model", "model")

    for call in (lambda client: client.generate("x"), lambda client: client.stream("x").collect()):
        with pytest.raises(QuireError) as caught:
            await with_client(address, call)
        assert caught.value.field in ("n", "model")
        assert caught.value.reason in ("INVALID_FIELD", "MODEL_NOT_FOUND")


async def test_breaking_out_of_a_stream_cancels_the_call(address: str, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()
    left = asyncio.Event()
    loop = asyncio.get_running_loop()

    def use(client: Client) -> None:
        for _ in client.stream("x"):
            break
        loop.call_soon_threadsafe(left.set)
        # The client stays open until the server has seen the cancellation: closing it would cancel, too.
        asyncio.run_coroutine_threadsafe(service.cancelled.wait(), loop).result(20)

    await with_client(address, use)
    assert left.is_set()


async def test_a_stream_closed_by_another_thread_ends_with_an_error(address: str, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()
    streams: list[Stream] = []
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def use(client: Client) -> None:
        streams.append(client.stream("x"))
        for _ in streams[0]:
            loop.call_soon_threadsafe(started.set)

    reader = asyncio.create_task(with_client(address, use))
    await started.wait()
    streams[0].close()

    with pytest.raises(QuireError) as caught:
        await reader
    assert caught.value.code is grpc.StatusCode.CANCELLED
    await asyncio.wait_for(service.cancelled.wait(), 60)


async def test_calls_of_a_closed_client_fail(address: str) -> None:
    client = Client(address)
    stream = client.stream("hello")
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        client.models,
        lambda: client.generate("hello"),
        lambda: client.cancel("name"),
        lambda: client.stream("hello").collect(),
        stream.collect,
    ]
    for call in calls:
        with pytest.raises(QuireError, match="the client was closed"):
            call()


async def test_interceptors_see_the_calls(address: str, service: Any) -> None:
    class Stamp(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            stamped = client_call_details._replace(metadata=(*client_call_details.metadata, ("stamp", "on")))
            return continuation(stamped, request)

    def use() -> None:
        with Client(address, interceptors=[Stamp()]) as client:
            client.models()

    await asyncio.to_thread(use)
    assert service.metadata[0]["stamp"] == "on"
