"""Chats and completions over WebSocket, by a client of another project."""

import asyncio
import base64
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import websockets
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from websockets.asyncio.client import ClientConnection, connect

from gateway_harness import Harness, encoded, running_gateway
from gateway_svc.http_api import websocket_connection
from gateway_svc.http_api.websocket_connection import BoundedWebSocket
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with, length_end
from tiny_model import EOS

HELLO = encoded("hello world")
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "stream": True}
CHATS = "/v1/chat/completions"
KEYS = '[[keys]]\nkey = "0123456789abcdef-one"\ntenant = "one"\n'


@asynccontextmanager
async def connected(quire: Harness, path: str = CHATS, **options: Any) -> AsyncIterator[ClientConnection]:
    url = f"ws://127.0.0.1:{quire.gateway.http_port}{path}"
    async with asyncio.timeout(60), connect(url, proxy=None, **options) as connection:
        yield connection


async def rest_of(connection: ClientConnection) -> list[Any]:
    """The messages of an answer up to [DONE], parsed."""
    messages = []
    while (message := await connection.recv()) != "[DONE]":
        messages.append(json.loads(message))
    return messages


async def refusal(quire: Harness, path: str = CHATS, **options: Any) -> tuple[int, str]:
    """Status and code of a refused connection."""
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connected(quire, path, **options):
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


async def close_code(connection: ClientConnection) -> int | None:
    """Waits until the gateway closes the connection."""
    await connection.wait_closed()
    return connection.close_code


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_says_when_to_try_again(quire: Harness, is_streamed: bool) -> None:
    reason = scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why", Duration(seconds=7))
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT | {"stream": is_streamed}))
        refused = json.loads(await connection.recv())
        assert (refused["error"]["code"], refused["retry_after"]) == ("tenant_quota_exceeded", 7)
        await connection.send(json.dumps({}))
        assert "retry_after" not in json.loads(await connection.recv())


async def test_the_messages_of_an_answer_are_the_events_of_the_same_post(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    body = CHAT | {"stream_options": {"include_usage": True}, "seed": 7}
    posted = await quire.http.post(CHATS, json=body)
    events = [json.loads(row.removeprefix("data: ")) for row in posted.text.split("\n\n")[:-2]]
    async with connected(quire) as connection:
        await connection.send(json.dumps(body))
        messages = await rest_of(connection)
    for one in (*events, *messages):
        one.pop("id"), one.pop("created")
    assert messages == events
    assert messages[-1]["usage"]["completion_tokens"] == 3


async def test_a_connection_has_one_answer_after_another(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    async with connected(quire) as connection:
        for _ in range(3):
            await connection.send(json.dumps(CHAT))
            deltas = [event["choices"][0]["delta"] for event in await rest_of(connection)]
            assert "".join(delta["content"] for delta in deltas) == "hello world"
        await connection.send(json.dumps(CHAT | {"stream": False}))
        assert json.loads(await connection.recv())["choices"][0]["message"]["content"] == "hello world"
    num_calls = f'quire_gateway_requests_total{{code="200",method="{CHATS}",model="tiny",protocol="http"}}'
    assert await quire.metric(num_calls) == 4


async def test_a_completion_by_another_client(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    url = f"http://127.0.0.1:{quire.gateway.http_port}/v1/completions/"
    async with asyncio.timeout(60), aiohttp.ClientSession() as session, session.ws_connect(url) as connection:
        await connection.send_json({"prompt": "a", "max_tokens": 2, "stream": True})
        texts = []
        while (message := await connection.receive_str()) != "[DONE]":
            texts.append(json.loads(message)["choices"][0]["text"])
    assert "".join(texts) == "hello world"


async def test_an_error_is_a_message_and_the_connection_stays(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    async with connected(quire) as connection:
        for sent, code, param in [
            ("{", "malformed_message", None),
            ("", "malformed_message", None),
            (json.dumps({"messages": MESSAGES, "temperature": -1}), "invalid_field", "temperature"),
            (json.dumps({"messages": MESSAGES, "model": "other"}), "model_not_found", "model"),
        ]:
            await connection.send(sent)
            error = json.loads(await connection.recv())["error"]
            assert (error["code"], error["param"]) == (code, param)
        await connection.send(json.dumps(CHAT))
        assert await rest_of(connection)


async def test_a_failure_in_mid_stream_is_the_last_message(quire: Harness) -> None:
    def script(session: Any, submit: Any) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, HELLO[:1], 0)
        session.fail(submit.key, scheduler_v1.FAILURE_REASON_INTERNAL, "broken")

    quire.scheduler.script = script
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT))
        first, *_, last = [json.loads(await connection.recv()) for _ in range(3)]
        assert first["choices"]
        assert last["error"]["code"] == "internal"


async def test_a_client_that_leaves_cancels_its_request(quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT))
        await quire.scheduler.next("submit")
    await quire.scheduler.next("cancel")


async def test_one_request_may_wait_for_its_turn(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT))
        await connection.send(json.dumps(CHAT))
        assert await rest_of(connection)
        assert await rest_of(connection)


async def test_a_third_request_at_a_time_closes_the_connection(quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT))
        await quire.scheduler.next("submit")
        for _ in range(2):
            await connection.send(json.dumps(CHAT))
        assert await close_code(connection) == 1008
    await quire.scheduler.next("cancel")


async def test_messages_that_come_at_once_have_a_bound(quire: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    data_received = BoundedWebSocket.data_received
    nums_queued = []

    def counted(self: BoundedWebSocket, data: bytes) -> None:
        data_received(self, data)
        nums_queued.append(self.queue.qsize())

    monkeypatch.setattr(BoundedWebSocket, "data_received", counted)
    async with connected(quire) as connection:
        connection.transport.write(b"\x81\x81\0\0\0\0{" * 5_000)
        assert await close_code(connection) == 1008
    assert max(nums_queued) < 20
    assert await quire.metric('quire_gateway_refusals_total{protocol="websocket",reason="calls"}') == 1


PINGS = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 8_000  # 1 MiB


@asynccontextmanager
async def unread(quire: Harness) -> AsyncIterator[socket.socket]:
    """A client that reads nothing after the handshake, and has sent pings until the gateway could write no more."""
    loop = asyncio.get_running_loop()
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
    key = base64.b64encode(bytes(16)).decode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", quire.gateway.http_port))
        await loop.sock_sendall(client, f"GET {CHATS} HTTP/1.1\r\nhost: localhost\r\n{upgrade}{key}\r\n\r\n".encode())
        assert (await loop.sock_recv(client, 12)).endswith(b" 101")
        for _ in range(16):
            await loop.sock_sendall(client, PINGS)
        yield client


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_pings_of_a_client_that_does_not_read_take_no_memory(quire: Harness) -> None:
    async with unread(quire) as client:
        before = resident_bytes()
        for _ in range(32):
            await asyncio.get_running_loop().sock_sendall(client, PINGS)
        assert resident_bytes() - before < 10 * 2**20


async def test_pings_are_answered(quire: Harness) -> None:
    async with connected(quire) as connection:
        for _ in range(2):
            await (await connection.ping())


@pytest.mark.parametrize(
    "sent",
    [b"\x88\x80\0\0\0\0", b"\x81\x81\0\0\0\0\xff", b"\xff\x80\0\0\0\0"],
    ids=["close", "text that is no text", "frame that is no frame"],
)
async def test_a_client_that_does_not_read_keeps_no_request_after_the_end(
    sent: bytes, quire: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_connection, "_CLOSE_SECONDS", 0.1)

    def script(session: Any, submit: Any) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, HELLO[:1], 0)

    quire.scheduler.script = script
    async with unread(quire) as client:
        loop, request = asyncio.get_running_loop(), json.dumps(CHAT).encode()
        await loop.sock_sendall(client, b"\x81%c\0\0\0\0%s" % (0x80 | len(request), request))
        await quire.scheduler.next("submit")
        await quire.http.get("/live")  # the tokens have come, and their event waits to be sent
        await loop.sock_sendall(client, sent)
        await quire.scheduler.next("cancel")
        async with asyncio.timeout(60):
            with suppress(ConnectionError):  # what was not read is discarded, and the connection reset
                while True:
                    await loop.sock_sendall(client, b"x")
                    await asyncio.sleep(0.05)


async def test_bytes_are_no_message(quire: Harness) -> None:
    async with connected(quire) as connection:
        await connection.send(json.dumps(CHAT).encode())
        assert await close_code(connection) == 1003


@pytest.mark.parametrize("count", [2, 50])
async def test_more_that_is_wrong_after_the_first_changes_nothing(
    count: int, quire: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    for frame, code in ((b"\x82\x80\0\0\0\0", 1003 if count == 2 else 1008), (b"\x81\x80\0\0\0\0", 1008)):
        async with connected(quire) as connection:
            await connection.send(json.dumps(CHAT))
            await quire.scheduler.next("submit")
            connection.transport.write(frame * count)
            assert await close_code(connection) == code
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    "header", [f"authorization: Bearer {'x' * 9_000}", "content-length: 3", "transfer-encoding: chunked"]
)
async def test_a_handshake_that_only_one_parser_takes_is_refused(header: str, model_directory: Path) -> None:
    async with running_gateway(model_directory) as quire:
        reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
        key = base64.b64encode(bytes(16)).decode()
        upgrade = f"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: {key}"
        writer.write(f"GET {CHATS} HTTP/1.1\r\nhost: localhost\r\n{upgrade}\r\n{header}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n")).split()[1] == b"400"
        # The gateway stops while the connection is still here.
    writer.close()


async def test_a_gateway_stops_although_a_client_does_not_end_its_closing_handshake(model_directory: Path) -> None:
    async with running_gateway(model_directory) as quire, connected(quire, close_timeout=0.1) as connection:
        connection.transport.pause_reading()
        connection.transport.write(b"\x88\x80\0\0\0\0")  # a close frame
        await asyncio.sleep(0.1)
        await quire.gateway.stop()


async def test_a_text_that_is_no_text_closes_the_connection(quire: Harness, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(quire) as connection:
        await connection.send(b"\xff", text=True)
        assert await close_code(connection) == 1007
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_message_has_a_largest_size(quire: Harness) -> None:
    async with connected(quire) as connection:
        with suppress(websockets.ConnectionClosed):
            await connection.send(" " * (16 * 2**20 + 1))
        assert await close_code(connection) == 1009


async def test_fragments_of_a_message_have_a_bound(quire: Harness) -> None:
    async with connected(quire) as connection:
        with suppress(websockets.ConnectionClosed):
            await connection.send("" for _ in range(100_000))
        assert await close_code(connection) == 1008


@pytest.mark.parametrize(
    "begun",
    [b"\x81", b"\x81\xfe", b"\x81\xfe\0", b"\x81\xfe\0\x80", b"\x81\xfe\0\x80abcd", b"\x81\xfe\0\x80abcdefg"],
    ids=["half a head", "its first part", "half a length", "its length", "its mask", "a part of its text"],
)
async def test_a_message_must_come_in_time(model_directory: Path, begun: bytes) -> None:
    async with running_gateway(model_directory, http_read_timeout=0.5) as quire, connected(quire) as connection:
        quire.scheduler.script = answer_with(HELLO)
        await asyncio.sleep(1)  # between messages a client has all the time
        await connection.send(json.dumps(CHAT))
        assert await rest_of(connection)
        connection.transport.write(begun)
        assert await close_code(connection) == 1008


async def test_a_credential_is_required_where_keys_are(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(HELLO)
        assert await refusal(quire) == (401, "unauthenticated")
        wrong = {"Authorization": "Bearer 0123456789abcdef-two"}
        assert await refusal(quire, additional_headers=wrong) == (401, "unauthenticated")
        key = "0123456789abcdef-one"
        ways: list[tuple[dict[str, Any], str | None]] = [
            ({"additional_headers": {"Authorization": f"Bearer {key}"}}, None),
            ({"subprotocols": [f"openai-insecure-api-key.{key}", "quire"]}, "quire"),
        ]
        for options, chosen in ways:
            async with connected(quire, **options) as connection:
                assert connection.subprotocol == chosen
                await connection.send(json.dumps(CHAT))
                assert await rest_of(connection)


async def test_a_key_that_is_revoked_ends_the_next_request(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    header = {"Authorization": "Bearer 0123456789abcdef-one"}
    async with (
        running_gateway(model_directory, api_keys=keys) as quire,
        connected(quire, additional_headers=header) as connection,
    ):
        quire.scheduler.script = answer_with(HELLO)
        await connection.send(json.dumps(CHAT))
        await rest_of(connection)
        keys.write_text(KEYS.replace("-one", "-two"))
        error: dict[str, Any] = {}
        while error.get("code") != "unauthenticated":
            await connection.send(json.dumps(CHAT | {"stream": False}))
            error = json.loads(await connection.recv()).get("error", {})


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("https://app.example.com", True),
        ("http://127.0.0.1:PORT", True),
        ("http://evil.com", False),
        ("https://app.example.com.evil.com", False),
        ("null", False),
        ("http://[", False),
        ("", False),
    ],
)
async def test_pages_of_other_sites_may_not_connect(model_directory: Path, origin: str, is_allowed: bool) -> None:
    async with running_gateway(model_directory, cors_origins="https://app.example.com") as quire:
        port = quire.gateway.http_port
        headers = {"Origin": origin.replace("PORT", str(port))}
        if is_allowed:
            async with connected(quire, additional_headers=headers):
                pass
        else:
            assert await refusal(quire, additional_headers=headers) == (403, "origin_not_allowed")


async def test_paths_may_begin_with_the_root_path(model_directory: Path) -> None:
    async with running_gateway(model_directory, root_path="/llm") as quire:
        quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
        for path in (CHATS, f"/llm{CHATS}"):
            async with connected(quire, path) as connection:
                await connection.send(json.dumps(CHAT))
                assert await rest_of(connection)
        assert await refusal(quire, f"/other{CHATS}") == (404, "not_found")


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/v1/responses"])
async def test_other_paths_have_none(quire: Harness, path: str) -> None:
    assert await refusal(quire, path) == (404, "not_found")


async def test_a_stream_with_a_name_is_resumed_after_its_last_event(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    name = {"Idempotency-Key": "chat-1"}
    async with connected(quire, additional_headers=name) as connection:
        await connection.send(json.dumps(CHAT))
        first, *others = await rest_of(connection)
    assert [first["event_id"], *(event["event_id"] for event in others)] == ["0r", "1", "2", "3e"]
    async with connected(quire, additional_headers=name | {"Last-Event-ID": "1"}) as connection:
        await connection.send(json.dumps(CHAT))
        assert [event["event_id"] for event in await rest_of(connection)] == ["2", "3e"]


async def test_connections_count_and_an_idle_one_makes_room(model_directory: Path) -> None:
    async with running_gateway(model_directory, max_http_connections=8) as quire:
        quire.scheduler.script = lambda session, submit: session.accept(submit.key)
        async with connected(quire) as busy, connected(quire) as idle:
            await busy.send(json.dumps(CHAT))
            await quire.scheduler.next("submit")
            async with connected(quire), connected(quire), connected(quire), connected(quire), connected(quire):
                async with connected(quire), connected(quire):
                    assert await close_code(idle) == 1006
                assert busy.state is websockets.State.OPEN


async def test_a_gateway_that_ends_says_so_and_lets_what_runs_end(model_directory: Path) -> None:
    async with running_gateway(model_directory, drain_grace=30) as quire, connected(quire) as other:
        quire.scheduler.script = lambda session, submit: session.accept(submit.key)
        async with connected(quire) as connection:
            await connection.send(json.dumps(CHAT))
            submit = await quire.scheduler.next("submit")
            stopping = asyncio.create_task(quire.gateway.stop())
            await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await other.send(json.dumps(CHAT))
            assert json.loads(await other.recv())["error"]["code"] == "draining"
            assert await close_code(other) == 1012
            quire.scheduler.session.tokens(submit.key, HELLO, 0, end=length_end())
            assert (await rest_of(connection))[-1]["choices"][0]["finish_reason"] == "length"
        await stopping


async def test_a_handshake_may_have_several_connection_headers(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    async with connected(quire, additional_headers={"Connection": "keep-alive"}) as connection:
        await connection.send(json.dumps(CHAT))
        assert await rest_of(connection)


async def test_a_handshake_behind_a_request_is_answered_after_it(quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
    body = json.dumps({"prompt": "a"}).encode()
    post = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{post}content-length: {len(body)}\r\n\r\n".encode() + body)
    submit = await quire.scheduler.next("submit")
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
    key = base64.b64encode(bytes(16)).decode()
    writer.write(f"GET {CHATS} HTTP/1.1\r\nhost: localhost\r\n{upgrade}{key}\r\n\r\n".encode())
    quire.scheduler.session.tokens(submit.key, HELLO, 0, end=length_end())
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        assert b"HTTP/1.1 101 " in await reader.readuntil(b"Switching Protocols")
    writer.close()


async def test_a_connection_that_is_upgraded_during_an_answer_is_closed(quire: Harness) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
    # So short that both are parsed at once.
    writer.write(b"GET /live HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_connections_of_an_address_have_a_bound(model_directory: Path) -> None:
    async with (
        running_gateway(model_directory, max_http_connections_per_address=3) as quire,
        connected(quire) as first,
        connected(quire),
        connected(quire),
        connected(quire),
    ):
        assert await close_code(first) == 1006
