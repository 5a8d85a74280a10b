"""The asyncio client against a real server."""

import asyncio
import inspect
import socket
from typing import Any

import grpc
import pytest

from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, Client, FinishReason, Message, QuireError
from quire_client.chats import Messages


@pytest.fixture
async def client(address: str) -> Any:
    async with AsyncClient(address) as client:
        yield client


def soon(awaitable: Any) -> Any:
    """A timeout for waits, so that a test fails instead of hanging."""
    return asyncio.wait_for(awaitable, 60)


async def test_a_stream_yields_chunks_between_acceptance_and_usage(client: AsyncClient, service: Any) -> None:
    service.answer("The", " capital")
    stream = client.stream("What?")
    assert stream.acceptance is None

    chunks = [chunk async for chunk in stream]

    assert [(chunk.offset, chunk.text, chunk.token_ids) for chunk in chunks] == [
        (0, "The", (1,)),
        (1, " capital", (1,)),
        (2, "", ()),
    ]
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.reason is FinishReason.LENGTH
    assert stream.acceptance is not None
    assert (stream.acceptance.request_id, stream.acceptance.model, stream.acceptance.seed) == ("r-1", "tiny", 7)
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens, stream.usage.cached_tokens) == (5, 2, 2)


async def test_collecting_puts_interleaved_sequences_together(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("one ", (10,), index=1)
    service.say("zero ", (20, 21), index=0)
    service.say("more", (11,), index=1, finish=pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=11))
    service.say("more", (22,), index=0, finish=pb.Finish(reason=pb.FINISH_REASON_STOP, stop="!"))
    service.account()

    generation = await client.stream("x", n=2).collect()

    assert [(c.index, c.text, c.token_ids) for c in generation.completions] == [
        (0, "zero more", (20, 21, 22)),
        (1, "one more", (10, 11)),
    ]
    assert [c.finish.matched for c in generation.completions] == ["!", 11]
    assert (generation.text, generation.finish_reason) == ("zero more", FinishReason.STOP)


async def test_logprobs_come_with_the_tokens_of_a_stream(client: AsyncClient, service: Any) -> None:
    second = pb.TokenLogprob(token_id=8, text="e", token_bytes=b"e", logprob=-2.5)
    first = pb.TokenLogprob(token_id=9, text="\ufffd", token_bytes=b"\xe2", logprob=-0.25, top=[second])
    service.accept()
    service.say("a", (9,), logprobs=[first], finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    service.account()

    (logprob,) = (await client.stream("x", logprobs=1).collect()).logprobs

    assert (logprob.token_id, logprob.token, logprob.token_bytes, logprob.logprob) == (9, "\ufffd", b"\xe2", -0.25)
    assert [(top.token_id, top.logprob) for top in logprob.top] == [(8, -2.5)]


async def test_generate_answers_with_the_whole(client: AsyncClient, service: Any) -> None:
    service.whole = pb.GenerateResponse(
        acceptance=pb.Acceptance(request_id="mine", model="tiny", seed=-3),
        completions=[
            pb.Completion(text="Paris.", token_ids=[3, 4], finish=pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=2))
        ],
        usage=pb.Usage(prompt_tokens=9, completion_tokens=2),
    )

    generation = await client.generate("What?", temperature=0)

    assert (generation.text, generation.token_ids, generation.finish_reason) == ("Paris.", (3, 4), FinishReason.STOP)
    assert (generation.request_id, generation.model, generation.seed) == ("mine", "tiny", -3)
    assert generation.usage.completion_tokens == 2
    assert service.requests[0].generation.text == "What?"


async def test_chat_sends_messages_in_their_order(client: AsyncClient, service: Any) -> None:
    messages: Messages = [Message("system", "Be brief."), {"role": "user", "content": "Hello"}]
    service.answer("Hi")
    await client.chat(messages)
    await client.stream_chat(messages).collect()

    assert len(service.requests) == 2
    for request in service.requests:
        sent = request.generation.chat.messages
        assert [(m.role, m.content) for m in sent] == [("system", "Be brief."), ("user", "Hello")]


async def test_breaking_out_of_a_stream_cancels_the_call(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()

    async for chunk in client.stream("x"):
        assert chunk.text == "first"
        break

    await soon(service.cancelled.wait())


async def test_a_held_stream_is_cancelled_by_break_too(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()
    stream = client.stream("x")

    async for _ in stream:
        break

    await soon(service.cancelled.wait())
    with pytest.raises(RuntimeError, match="read once"):
        await stream.collect()


async def test_leaving_the_context_cancels_the_call(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()

    async with client.stream("x") as stream:
        assert (await anext(aiter(stream))).text == "first"

    await soon(service.cancelled.wait())


async def test_a_stream_closed_by_another_task_ends_with_an_error(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()
    stream = client.stream("x")
    started = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            started.set()

    reader = asyncio.create_task(read())
    await soon(started.wait())
    await stream.aclose()

    with pytest.raises(QuireError) as caught:
        await soon(reader)
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_cancelling_the_reading_task_cancels_the_call(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()
    started = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x"):
            started.set()

    reader = asyncio.create_task(read())
    await soon(started.wait())
    reader.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reader
    await soon(service.cancelled.wait())


async def test_a_timeout_travels_as_deadline_and_ends_the_call(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.hold()

    with pytest.raises(QuireError) as caught:
        await client.stream("x", timeout=2).collect()

    assert (caught.value.reason, caught.value.message) == ("DEADLINE_EXCEEDED", "no answer within the timeout")
    assert service.time_remaining[0] < 5
    await soon(service.cancelled.wait())


async def test_the_timeout_of_the_client_holds_for_calls_without_one(address: str, service: Any) -> None:
    async with AsyncClient(address, timeout=50) as client:
        await client.models()
        await client.models(timeout=5000)

    assert service.time_remaining[0] < 60 < 4900 < service.time_remaining[1]


async def test_key_and_trace_context_travel_as_metadata(address: str, service: Any) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with AsyncClient(address, api_key="secret") as client:
        await client.generate("x", traceparent=traceparent)

    assert service.metadata[0]["authorization"] == "Bearer secret"
    assert service.metadata[0]["traceparent"] == traceparent


async def test_address_and_key_come_from_the_environment(
    address: str, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "from-there")
    async with AsyncClient() as client:
        await client.models()

    assert service.metadata[0]["authorization"] == "Bearer from-there"


async def test_interceptors_see_the_calls(address: str, service: Any) -> None:
    class Stamp(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            stamped = client_call_details._replace(metadata=(*client_call_details.metadata, ("stamp", "on")))
            return await continuation(stamped, request)

    async with AsyncClient(address, interceptors=[Stamp()]) as client:
        await client.models()

    assert service.metadata[0]["stamp"] == "on"


async def test_a_refusal_names_reason_field_and_when_to_return(client: AsyncClient, service: Any) -> None:
    service.refuse_with_details(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "must be above 0", "sampling.top_p", 3, "r-9"
    )

    with pytest.raises(QuireError, match=r"sampling\.top_p: must be above 0") as caught:
        await client.generate("x", top_p=0)

    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert (error.field, error.message) == ("sampling.top_p", "must be above 0")
    assert (error.retry_after, error.request_id) == (3.0, "r-9")


async def test_an_error_in_mid_stream_comes_after_the_chunks(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.break_off(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error 1f")
    chunks = aiter(client.stream("x"))

    assert (await anext(chunks)).text == "first"
    with pytest.raises(QuireError, match="internal error 1f") as caught:
        await anext(chunks)
    assert caught.value.reason == "INTERNAL"


async def test_an_error_without_details_is_named_by_its_code(client: AsyncClient, service: Any) -> None:
    service.refuse(grpc.StatusCode.UNIMPLEMENTED, "not here", [("x-request-id", "r-3")])

    with pytest.raises(QuireError, match="not here") as caught:
        await client.models()

    assert (caught.value.reason, caught.value.request_id) == ("UNIMPLEMENTED", "r-3")


async def test_details_that_do_not_parse_are_no_second_error(client: AsyncClient, service: Any) -> None:
    service.refuse(grpc.StatusCode.NOT_FOUND, "gone", [("grpc-status-details-bin", b"\xff\xff")])

    with pytest.raises(QuireError, match="gone") as caught:
        await client.models()

    assert caught.value.reason == "NOT_FOUND"


async def test_the_error_of_an_unreachable_address_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so no other process gets the port
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(QuireError, match=address) as caught:
                await client.models()

    assert caught.value.reason == "UNREACHABLE"


async def test_a_call_that_no_gateway_accepted_is_repeated(client: AsyncClient, service: Any) -> None:
    service.refuse_with_details(grpc.StatusCode.UNAVAILABLE, "DRAINING", "draining")
    service.answer("after all")

    assert (await client.stream("x").collect()).text == "after all"
    assert len(service.requests) == 2


async def test_a_stream_that_began_is_not_sent_again_without_resuming(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.break_off(grpc.StatusCode.UNAVAILABLE, "DRAINING", "draining")

    with pytest.raises(QuireError, match="draining"):
        await client.stream("x", resume=False).collect()

    (request,) = service.requests
    assert not request.generation.HasField("request_id")


async def test_an_abandoned_request_is_cancelled_by_its_generated_name(client: AsyncClient, service: Any) -> None:
    service.accept()
    service.say("first")
    service.hold()

    async with client:
        async for _ in client.stream("x"):
            break

    request, cancel = service.requests
    assert cancel.request_id == request.generation.request_id


async def test_a_request_that_its_caller_named_is_left_to_be_resumed(client: AsyncClient, service: Any) -> None:
    service.accept("mine")
    service.say("first")
    service.hold()

    async with client, client.stream("x", request_id="mine") as stream:
        await anext(aiter(stream))

    await soon(service.cancelled.wait())
    assert len(service.requests) == 1


async def test_an_answer_that_is_not_waited_for_any_more_is_cancelled(client: AsyncClient, service: Any) -> None:
    service.hold_whole = True

    asking = asyncio.create_task(client.generate("x"))
    await soon(service.holding.wait())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    request, cancel = service.requests
    assert cancel.request_id == request.generation.request_id


async def test_what_ended_by_itself_is_not_cancelled(client: AsyncClient, service: Any) -> None:
    service.answer("all of it")
    async with client, client.stream("x") as stream:
        await stream.collect()
        await client.generate("x")

    assert [type(request).__name__ for request in service.requests] == ["StreamGenerateRequest", "GenerateRequest"]


@pytest.mark.parametrize("missing", ["token", "usage"])
async def test_a_stream_with_a_gap_is_an_error(client: AsyncClient, service: Any, missing: str) -> None:
    service.answer("one", "two", "three")
    del service.script[2 if missing == "token" else -1]

    with pytest.raises(QuireError) as caught:
        await client.stream("x").collect()

    assert (caught.value.reason, caught.value.request_id) == ("BROKEN_STREAM", "r-1")


async def test_the_smaller_calls(client: AsyncClient, service: Any) -> None:
    tokenized = await client.tokenize("a text", model="tiny")
    assert (tokenized.token_ids, tokenized.context_length) == ((4, 5), 64)
    await client.tokenize([Message("user", "Hello")])
    assert await client.detokenize([4, 5], keep_special_tokens=True) == "so it says"
    (model,) = await client.models()
    assert (model.name, model.context_length, model.vocab_size, model.aliases) == ("tiny", 64, 512, ("small",))
    await client.cancel("r-1")

    text, chat, detokenize, _, cancel = service.requests
    assert (text.text, text.model) == ("a text", "tiny")
    assert chat.chat.messages[0].content == "Hello"
    assert not chat.HasField("model")
    assert (list(detokenize.token_ids), detokenize.keep_special_tokens) == ([4, 5], True)
    assert cancel.request_id == "r-1"


def test_a_client_can_be_made_before_there_is_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "get_event_loop", None)
    client = AsyncClient("127.0.0.1:1")
    asyncio.run(client.aclose())


@pytest.mark.parametrize("name", [name for name in vars(AsyncClient) if not name.startswith("_")])
def test_both_clients_have_the_same_calls(name: str) -> None:
    blocking = getattr(Client, name.removeprefix("a") if name == "aclose" else name)

    assert inspect.signature(blocking).parameters == inspect.signature(getattr(AsyncClient, name)).parameters
