"""Calls and bytes of bodies that one tenant may have in progress, and what it leaves to another one."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from embedding_calls import LIMITS
from gateway_calls import asking
from gateway_harness import MODEL, Harness, encoded, plain_client, reason_of, running_gateway
from gateway_svc.call_limits import BODY_BYTES, CALLS, CallLimits
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import NoShare, TenantShares
from gateway_svc.tokenizer import ModelTokenizer
from quire.inference.v1 import inference_pb2 as api
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire.open_inference.v2 import open_inference_pb2 as pb
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripted_scheduler import answer_with, embed_with
from svc_common.server import PUBLIC_MESSAGE_BYTES
from tiny_model import EOS

MIB = 2**20
LEAST_MEMORY = 1 / 32  # GiB of bodies: two of the largest ones
LARGE_MESSAGES = {"max_grpc_message_bytes": PUBLIC_MESSAGE_BYTES}
BODY = {"prompt": "hello", "max_tokens": 5}
GENERATE = "/quire.inference.v1.InferenceService/Generate"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(f'[[keys]]\nkey = "the-own-key-of-{name}"\ntenant = "{name}"\n' for name in ("alice", "bob"))
    )
    return path


def headers(who: str) -> dict[str, str]:
    return {"x-api-key": f"the-own-key-of-{who}"}


def metadata(who: str) -> tuple[tuple[str, str], ...]:
    return tuple(headers(who).items())


def refusals(answers: list[httpx.Response]) -> list[httpx.Response]:
    assert {answer.status_code for answer in answers} <= {200, 429}
    return [answer for answer in answers if answer.status_code == 429]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def waiting_posts(quire: Harness, who: str, count: int) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Completions, each on a connection of its own, that the scheduler does not answer."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(plain_client(quire.gateway.http_port)) for _ in range(count)]
        posts = [asyncio.create_task(one.post("/v1/completions", json=BODY, headers=headers(who))) for one in clients]
        try:
            yield posts
        finally:
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)


async def test_a_tenant_leaves_connections_over_http_to_others(model_directory: Path, keys: Path) -> None:
    async with running_gateway(model_directory, api_keys=keys, max_http_connections=8) as quire:
        async with waiting_posts(quire, "alice", 8) as posts:
            await until(lambda: len(quire.scheduler.all("submit")) == 4 and sum(post.done() for post in posts) == 4)
            for refused in refusals([post.result() for post in posts if post.done()]):
                assert refused.json()["error"]["code"] == "tenant_quota_exceeded"
                assert "4 calls in progress" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
            for _ in range(3):
                async with plain_client(quire.gateway.http_port) as bob:
                    assert (await bob.get("/v1/models", headers=headers("bob"))).status_code == 200
        # What has ended counts no longer.
        async with waiting_posts(quire, "alice", 4):
            await until(lambda: len(quire.scheduler.all("submit")) == 8)


async def test_a_number_may_be_set(model_directory: Path, keys: Path) -> None:
    async with (
        running_gateway(model_directory, api_keys=keys, max_tenant_calls=1) as quire,
        waiting_posts(quire, "alice", 1),
    ):
        await until(lambda: len(quire.scheduler.all("submit")) == 1)
        assert (await quire.http.get("/v1/models", headers=headers("alice"))).status_code == 429
        assert (await quire.http.get("/v1/models", headers=headers("bob"))).status_code == 200


@pytest.mark.parametrize("reads", [True, False])
async def test_a_call_counts_until_its_answer_is_read_or_its_client_leaves(
    reads: bool, encoder_directory: Path, keys: Path
) -> None:
    body = json.dumps({"input": ["a"] * 64}).encode()  # a vector of 64 Ki numbers takes 256 KiB
    head = f"POST /v1/embeddings HTTP/1.1\r\nx-api-key: the-own-key-of-alice\r\ncontent-length: {len(body)}\r\n"
    async with running_gateway(encoder_directory, api_keys=keys, max_tenant_calls=1, **LIMITS) as quire:
        quire.scheduler.script = embed_with(lambda _: [0.5] * 2**16)

        async def models() -> int:
            return (await quire.http.get("/v1/models", headers=headers("alice"))).status_code

        reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        async with asyncio.timeout(60):
            assert b" 200 " in await reader.readline()
            assert await models() == 429
            fields = await reader.readuntil(b"\r\n\r\n")
            if reads:
                await reader.readexactly(int(re.findall(rb"content-length: (\d+)", fields)[0]))
            else:
                writer.close()
            while await models() != 200:
                await asyncio.sleep(0.01)
        writer.close()


async def test_calls_that_cancel_others_have_spare_places(model_directory: Path, keys: Path) -> None:
    request = api.StreamGenerateRequest(generation=asking(request_id="mine").generation)
    async with running_gateway(model_directory, api_keys=keys, max_tenant_calls=1) as quire:
        stream = quire.stub.StreamGenerate(request, metadata=metadata("alice"))
        submit = await quire.scheduler.next("submit")
        await quire.stub.Cancel(api.CancelRequest(request_id="mine"), metadata=metadata("alice"))
        assert (await quire.scheduler.next("cancel")).key == submit.key
        stream.cancel()
        async with waiting_posts(quire, "alice", 1):
            await until(lambda: len(quire.scheduler.all("submit")) == 2)
            url = "/v1/responses/resp_0123456789abcdef0123456789abcdef"
            assert (await quire.http.get(url, headers=headers("alice"))).status_code == 429
            assert (await quire.http.post(f"{url}/cancel", headers=headers("alice"))).status_code == 404
            assert (await quire.http.delete(url, headers=headers("alice"))).status_code == 404


def test_spare_places_have_a_bound() -> None:
    limits, tenant = CallLimits(TenantShares(1, CALLS), TenantShares(1, BODY_BYTES)), Tenant("alice")
    limits.begin(tenant)
    with pytest.raises(NoShare):
        limits.begin(tenant)
    calls = [limits.begin(tenant, cancels=True) for _ in range(32)]
    with pytest.raises(NoShare, match="32 calls in progress in spare places"):
        limits.begin(tenant, cancels=True)
    calls[0].end()
    limits.begin(tenant, cancels=True)
    limits.begin(Tenant("bob"), cancels=True)


async def test_without_keys_the_only_tenant_has_all_connections(model_directory: Path) -> None:
    async with (
        running_gateway(model_directory, max_http_connections=8) as quire,
        waiting_posts(quire, "nobody", 8),
    ):
        await until(lambda: len(quire.scheduler.all("submit")) == 8)


async def test_requests_of_websockets_count_and_idle_ones_do_not(model_directory: Path, keys: Path) -> None:
    async with (
        running_gateway(model_directory, api_keys=keys, max_tenant_calls=2) as quire,
        AsyncExitStack() as stack,
    ):
        url = f"ws://127.0.0.1:{quire.gateway.http_port}/v1/completions"
        sockets: list[ClientConnection] = [
            await stack.enter_async_context(connect(url, additional_headers=headers("alice"))) for _ in range(3)
        ]
        for socket in sockets[:2]:
            await socket.send('{"prompt": "hello"}')
        await until(lambda: len(quire.scheduler.all("submit")) == 2)
        await sockets[2].send('{"prompt": "hello"}')
        assert "tenant_quota_exceeded" in str(await asyncio.wait_for(sockets[2].recv(), 60))
        async with waiting_posts(quire, "bob", 1):
            await until(lambda: len(quire.scheduler.all("submit")) == 3)


@asynccontextmanager
async def stubs(quire: Harness, count: int) -> AsyncIterator[list[Any]]:
    """Stubs, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{quire.gateway.grpc_port}"
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(count)]
        yield [InferenceServiceStub(await stack.enter_async_context(channel)) for channel in channels]


async def test_a_tenant_leaves_calls_over_grpc_to_others(model_directory: Path, keys: Path) -> None:
    request = api.StreamGenerateRequest(generation=asking().generation)
    async with (
        running_gateway(model_directory, api_keys=keys, max_grpc_connections=8) as quire,
        stubs(quire, 4) as clients,
    ):
        streams = [client.StreamGenerate(request, metadata=metadata("alice")) for client in clients]
        await until(lambda: len(quire.scheduler.all("submit")) == 4)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await quire.stub.ListModels(api.ListModelsRequest(), metadata=metadata("alice"))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(raised.value)[0] == "TENANT_QUOTA_EXCEEDED"
        await quire.stub.ListModels(api.ListModelsRequest(), metadata=metadata("bob"))
        for stream in streams:
            stream.cancel()
        await until(lambda: len(quire.scheduler.all("cancel")) == 4 or len(quire.scheduler.all("detach")) == 4)
        await quire.stub.ListModels(api.ListModelsRequest(), metadata=metadata("alice"))


async def never() -> AsyncIterator[bytes]:
    """No message."""
    await asyncio.Event().wait()
    yield b""


async def test_grpc_messages_that_do_not_come_have_a_bound(model_directory: Path, keys: Path) -> None:
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY, **LARGE_MESSAGES) as quire:
        channel: Any = quire.channel
        calls = [channel.stream_unary(GENERATE)(never(), metadata=metadata("alice")) for _ in range(3)]
        done, _ = await asyncio.wait([asyncio.create_task(call.code()) for call in calls[1:]], timeout=60)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert not calls[0].done()
        bob = channel.stream_unary(GENERATE)(never(), metadata=metadata("bob"))
        await asyncio.sleep(2)
        assert not bob.done()
        for call in (*calls, bob):
            call.cancel()


@contextmanager
def slow_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Texts are tokenized only at the end of the block."""
    go_on = threading.Event()
    encode = ModelTokenizer._encode_text

    def encode_slowly(self: ModelTokenizer, text: str, max_tokens: int | None, add_special: bool) -> list[int]:
        assert go_on.wait(120)
        return encode(self, text, max_tokens, add_special)

    with monkeypatch.context() as patch:
        patch.setattr(ModelTokenizer, "_encode_text", encode_slowly)
        try:
            yield
        finally:
            go_on.set()


async def test_texts_over_grpc_that_wait_have_a_bound(
    model_directory: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = api.TokenizeRequest(text="a" * (6 * MIB))
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY, **LARGE_MESSAGES) as quire:
        with slow_texts(monkeypatch):
            calls = [quire.stub.Tokenize(request, metadata=metadata("alice")) for _ in range(3)]
            done, waiting = await asyncio.wait(
                [asyncio.create_task(call.code()) for call in calls], timeout=60, return_when=asyncio.FIRST_COMPLETED
            )
            assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert len(waiting) == 2
        codes = await asyncio.gather(*waiting)
        assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 2  # too many tokens
        assert await quire.stub.Tokenize(request, metadata=metadata("alice")).code() is codes[0]


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def sending(quire: Harness, who: str, size: int) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which all of a body of 16 MiB has been sent but the rest after `size` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
    try:
        writer.write(POST + b"x-api-key: the-own-key-of-%s\r\ncontent-length: %d\r\n\r\n" % (who.encode(), 16 * MIB))
        writer.write(b" " * size)
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        return head + (await reader.readexactly(length)).decode()


async def test_bodies_over_http_that_arrive_have_a_bound(model_directory: Path, keys: Path) -> None:
    large = {"prompt": "a" * (4 * MIB)}
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY) as quire:
        async with sending(quire, "alice", 15 * MIB) as first, sending(quire, "alice", 15 * MIB) as second:
            answers = [asyncio.create_task(answer_of(one)) for one in (first, second)]
            done, _ = await asyncio.wait(answers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            answer = done.pop().result()
            assert answer.startswith("HTTP/1.1 429 ")
            assert "tenant_quota_exceeded" in answer
            assert "bytes of bodies in progress" in answer
            assert "\r\nretry-after: " in answer
            response = await quire.http.post("/v1/completions", json=large, headers=headers("bob"))
            assert response.json()["error"]["code"] == "context_length_exceeded"
            for one in answers:
                one.cancel()
        response = await quire.http.post("/v1/completions", json=large, headers=headers("alice"))
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_without_keys_bodies_have_the_bound_of_the_gateway(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = TenantShares.take

    def counted(shares: TenantShares, tenant: str, count: int) -> None:
        take(shares, tenant, count)
        taken.append(count)

    monkeypatch.setattr(TenantShares, "take", counted)
    async with (
        running_gateway(model_directory, body_memory=LEAST_MEMORY) as quire,
        sending(quire, "nobody", 15 * MIB),
        sending(quire, "nobody", 15 * MIB),
    ):
        await until(lambda: sum(taken) >= 30 * MIB)  # else one of these could be refused instead
        response = await quire.http.post("/v1/completions", json={"prompt": "a" * (4 * MIB)})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "capacity_exhausted"


async def test_a_body_counts_until_its_request_is_submitted(model_directory: Path, keys: Path) -> None:
    body = BODY | {"user": "a" * (3 * MIB)}
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY) as quire:

        async def post() -> httpx.Response:
            return await quire.http.post("/v1/completions", json=body, headers=headers("alice"))

        posts = []
        for count in range(1, 9):  # 24 MiB of bodies in all, where a tenant's may take 16
            posts.append(asyncio.create_task(post()))
            await until(lambda count=count: len(quire.scheduler.all("submit")) == count)
        for one in posts:
            one.cancel()


async def test_messages_of_websockets_that_arrive_have_a_bound(model_directory: Path, keys: Path) -> None:
    async def parts() -> AsyncIterator[str]:
        for _ in range(15):
            yield "a" * MIB
        await asyncio.Event().wait()

    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        url = f"ws://127.0.0.1:{quire.gateway.http_port}/v1/completions"
        async with (
            connect(url, additional_headers=headers("alice"), compression=None) as first,
            connect(url, additional_headers=headers("alice"), compression=None) as second,
        ):
            sends = [asyncio.create_task(one.send(parts())) for one in (first, second)]
            closed = [asyncio.create_task(one.wait_closed()) for one in (first, second)]
            done, _ = await asyncio.wait(closed, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            code = (first if closed[0] in done else second).close_code
            assert code == 1013
            response = await quire.http.post("/v1/completions", json=BODY, headers=headers("bob"))
            assert response.status_code == 200
            for task in (*sends, *closed):
                task.cancel()
            await asyncio.gather(*sends, *closed, return_exceptions=True)


HANDSHAKE = (
    b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
    b"x-api-key: the-own-key-of-alice\r\n\r\n"
)
BINARY_MESSAGE = b"\x82\x81\0\0\0\0a"


def text_message(length: int) -> bytes:
    """The beginning of a message of this length, without its text."""
    return b"\x81\xff" + length.to_bytes(8, "big") + b"\0\0\0\0"


async def test_what_comes_after_a_websocket_was_closed_counts_until_its_connection_ends(
    model_directory: Path, keys: Path
) -> None:
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY) as quire:
        for _ in range(2):  # 12 MiB each, where a tenant's may take 16
            reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
            writer.write(HANDSHAKE)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            writer.write(BINARY_MESSAGE)
            frame = await asyncio.wait_for(reader.readexactly(4), 60)
            assert (frame[0], int.from_bytes(frame[2:])) == (0x88, 1003)
            writer.write(text_message(12 * MIB + 1) + b"a" * (12 * MIB))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        large = {"prompt": "a" * (12 * MIB)}
        async with asyncio.timeout(60):
            while (await quire.http.post("/v1/completions", json=large, headers=headers("alice"))).status_code == 429:
                await asyncio.sleep(0.1)  # until the connections have ended


async def test_messages_of_a_grpc_stream_that_wait_have_a_bound(
    model_directory: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * (6 * MIB)
    request = pb.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY, **LARGE_MESSAGES) as quire:
        stub: Any = GRPCInferenceServiceStub(quire.channel)
        call = stub.ModelStreamInfer(metadata=metadata("alice"))
        with slow_texts(monkeypatch):
            for _ in range(3):
                await call.write(request)
            assert "bytes of bodies in progress" in (await call.read()).error_message
        for _ in range(2):
            assert "context" in (await call.read()).error_message
        await call.write(request)
        assert "context" in (await call.read()).error_message
        call.cancel()


def infer(text: str) -> pb.ModelInferRequest:
    """A request of a KServe stream."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return request


async def test_grpc_streams_whose_next_message_does_not_come_have_a_bound(model_directory: Path, keys: Path) -> None:
    """Each may hold a part of a message. One that has a request in progress is not ended: it does not read."""
    async with running_gateway(model_directory, api_keys=keys, body_memory=LEAST_MEMORY, **LARGE_MESSAGES) as quire:
        stub: Any = GRPCInferenceServiceStub(quire.channel)
        working = stub.ModelStreamInfer(metadata=metadata("alice"))
        await working.write(infer("hello"))
        submit = await quire.scheduler.next("submit")
        idle = [stub.ModelStreamInfer(metadata=metadata("alice")) for _ in range(3)]
        codes = [asyncio.create_task(one.code()) for one in idle]
        assert await asyncio.wait_for(asyncio.gather(*codes), 60) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
        assert "messages that arrive slowly" in await idle[0].details()
        answer = answer_with(encoded("hello world"), stop_token_id=EOS)
        answer(quire.scheduler.session, submit)
        assert (await working.read()).infer_response.outputs
        quire.scheduler.script = answer
        other = stub.ModelStreamInfer(metadata=metadata("bob"))
        await other.write(infer("hello"))
        assert (await other.read()).infer_response.outputs
        working.cancel()
        other.cancel()
