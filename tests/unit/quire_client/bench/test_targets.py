"""Servers under load: Quire over gRPC, and an HTTP server with scripted responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from quire_client import AsyncClient
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import OpenAITarget, QuireTarget, TargetError, TargetModel
from quire_client.http_client import http_client

REQUEST = MixRequest((5, 6, 7), 4)


@dataclass
class HttpServer:
    """Answers one request per connection with the response for its path."""

    answers: dict[str, tuple[str, str]] = field(default_factory=dict)
    bodies: list[Any] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles a connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.headers.append(head)
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
        if length:
            self.bodies.append(json.loads(await reader.readexactly(length)))
        status, body = self.answers[head.split(" ")[1]]
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class Fate(Enum):
    """What happens to a stream after its last piece."""

    ENDS = "ends"
    BREAKS = "breaks"
    STALLS = "stalls"


class Piecewise:
    """Answers each request with the pieces, each as a chunk of its own, and keeps its connections."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.fate = Fate.ENDS
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles a connection."""
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(
                    next(int(line[15:]) for line in head.split("\r\n") if "content-length" in line)
                )
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for piece in self.pieces:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)  # the client reads
                if self.fate is Fate.BREAKS:
                    return
                if self.fate is Fate.STALLS:
                    await reader.read()
                    return
                await asyncio.sleep(0.01)  # the client has read the last event by now; the end follows separately
                writer.write(b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass  # the client disconnected
        finally:
            writer.close()


@pytest.fixture
async def piecewise() -> AsyncIterator[Piecewise]:
    scripted = Piecewise()
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield scripted


@pytest.fixture
async def http_server() -> AsyncIterator[HttpServer]:
    scripted = HttpServer()
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    scripted.answers["/v1/models"] = ("200 OK", '{"data": [{"id": "tiny"}, {"id": "other"}]}')
    async with server:
        yield scripted


@pytest.fixture
async def target(http_server: HttpServer) -> AsyncIterator[OpenAITarget]:
    async with http_client(http_server.url, "secret", None) as http:
        yield OpenAITarget(http_server.url, http)


def events(*items: Any) -> str:
    return "".join(f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items)


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


@pytest.mark.parametrize("asked", [None, "tiny", "small"])
async def test_quires_model_is_found_by_name_or_alias_or_is_the_first(asked: str | None, address: str) -> None:
    async with AsyncClient(address) as client:
        assert await QuireTarget(client, asked).model() == TargetModel("tiny", 512)
        with pytest.raises(TargetError, match="no model other"):
            await QuireTarget(client, "other").model()


async def test_requests_to_quire_have_exact_lengths_and_count_token_ids(address: str, service: Any) -> None:
    service.accept()
    service.say("", (1,))
    service.say("two at once", (2, 3))
    service.say("", ())
    service.say("held back until here", (4,))
    service.end()
    service.account()
    counted: list[int] = []

    async with AsyncClient(address) as client:
        timeline = await QuireTarget(client).run(REQUEST, counted.append)

    assert [arrival.num_tokens for arrival in timeline.arrivals] == counted == [1, 2, 1]
    assert timeline.sent <= timeline.arrivals[0].at <= timeline.arrivals[-1].at
    sent = service.requests[0].generation
    assert list(sent.token_ids.ids) == [5, 6, 7]
    assert (sent.stopping.max_tokens, sent.stopping.ignore_eos, sent.sampling.temperature) == (4, True, 0.0)
    assert not sent.HasField("request_id")  # measured requests are not resumable


async def test_quires_model_is_read(address: str, service: Any) -> None:
    async with AsyncClient(address) as client:
        model = await QuireTarget(client).model()
        assert (model.name, model.vocab_size) == ("tiny", 512)
        with pytest.raises(TargetError, match="absent"):
            await QuireTarget(client, "absent").model()


async def test_requests_to_an_http_server_have_exact_lengths(http_server: HttpServer, target: OpenAITarget) -> None:
    http_server.answers["/v1/completions"] = (
        "200 OK",
        events(text("a"), text("b"), text(""), text("c"), text("d"), USAGE, "[DONE]"),
    )
    counted: list[int] = []

    timeline = await target.run(REQUEST, counted.append)

    assert [arrival.num_tokens for arrival in timeline.arrivals] == counted == [1, 1, 1, 1]
    (body,) = http_server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("tiny", [5, 6, 7], 4)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert all("authorization: bearer secret" in head for head in http_server.headers)


async def test_tokens_of_an_http_stream_are_counted_by_its_usage(http_server: HttpServer, target: OpenAITarget) -> None:
    stream = f": ping\n\n{events(text('ab'))}: ping\n\n{events(text('cd'), USAGE, '[DONE]')}"
    http_server.answers["/v1/completions"] = ("200 OK", stream)

    timeline = await target.run(REQUEST, lambda count: None)

    assert [arrival.num_tokens for arrival in timeline.arrivals] == [2, 2]


async def test_the_url_may_end_in_v1(http_server: HttpServer) -> None:
    async with http_client(http_server.url, None, None) as http:
        assert (await OpenAITarget(f"{http_server.url}/v1/", http).model()).name == "tiny"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        ("400 Bad Request", '{"error": {"message": "no such thing as ignore_eos"}}', "no such thing as ignore_eos"),
        ("502 Bad Gateway", "<html>", "HTTP status 502"),
        ("200 OK", events(text("a"), {"error": {"message": "out of memory"}}), "out of memory"),
        ("200 OK", events(text("a")), "ended early"),
        ("200 OK", events(text("a"), "[DONE]"), "without usage"),
        ("200 OK", events(USAGE, "[DONE]"), "without a token"),
        ("200 OK", events("{"), "does not stream"),
        ("200 OK", events("[]"), "does not stream"),
    ],
)
async def test_errors_of_an_http_server_are_reported(
    http_server: HttpServer, target: OpenAITarget, status: str, body: str, message: str
) -> None:
    http_server.answers["/v1/completions"] = (status, body)

    with pytest.raises(TargetError, match=message):
        await target.run(REQUEST, lambda count: None)


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
async def test_a_stream_is_read_however_it_is_cut(ending: str, size: int, piecewise: Piecewise) -> None:
    stream = f": ping\n\nevent: message\nid: 1\n{events(text('é'), text('字🙂'), USAGE)}data:[DONE]\n\n: bye\n\n"
    answer = stream.replace("\n", ending).encode()
    piecewise.pieces = [answer[start : start + size] for start in range(0, len(answer), size)]

    async with http_client(piecewise.url, None, None) as http:
        timeline = await OpenAITarget(piecewise.url, http, "tiny").run(REQUEST, lambda count: None)

    assert [arrival.num_tokens for arrival in timeline.arrivals] == [2, 2]


async def test_the_last_line_may_be_without_an_end(piecewise: Piecewise) -> None:
    piecewise.pieces = [events(text("a"), USAGE).encode(), b"data: [DO", b"NE]"]

    async with http_client(piecewise.url, None, None) as http:
        timeline = await OpenAITarget(piecewise.url, http, "tiny").run(REQUEST, lambda count: None)

    assert timeline.num_tokens == 4


async def test_an_error_event_in_pieces_is_reported(piecewise: Piecewise) -> None:
    error = events(text("a"), {"error": {"message": "no memory"}}).encode()
    piecewise.pieces = [error[place : place + 1] for place in range(len(error))]

    async with http_client(piecewise.url, None, None) as http:
        with pytest.raises(TargetError, match="no memory"):
            await OpenAITarget(piecewise.url, http, "tiny").run(REQUEST, lambda count: None)


async def test_a_connection_is_used_again(piecewise: Piecewise) -> None:
    piecewise.pieces = [events(text("a"), USAGE, "[DONE]").encode()]

    async with http_client(piecewise.url, None, None) as http:
        target = OpenAITarget(piecewise.url, http, "tiny")
        for _ in range(3):
            await target.run(REQUEST, lambda count: None)

    assert piecewise.num_connections == 1


async def test_a_stream_that_breaks_is_no_server_that_is_not_there(piecewise: Piecewise) -> None:
    piecewise.pieces = [events(text("a")).encode()]
    piecewise.fate = Fate.BREAKS

    async with http_client(piecewise.url, None, None) as http:
        with pytest.raises(TargetError, match=f"the connection to {piecewise.url} broke"):
            await OpenAITarget(piecewise.url, http, "tiny").run(REQUEST, lambda count: None)


async def test_an_answer_takes_no_longer_than_the_timeout(piecewise: Piecewise) -> None:
    piecewise.pieces = [events(text("a")).encode()]
    piecewise.fate = Fate.STALLS

    async with http_client(piecewise.url, None, 1) as http:
        with pytest.raises(TargetError, match=f"no answer from {piecewise.url} within the timeout"):
            await OpenAITarget(piecewise.url, http, "tiny").run(REQUEST, lambda count: None)


@pytest.mark.parametrize("answer", [("200 OK", "{}"), ("200 OK", '{"data": []}'), ("200 OK", "<html>")])
async def test_a_server_of_another_kind_is_detected_by_its_models(
    http_server: HttpServer, target: OpenAITarget, answer: tuple[str, str]
) -> None:
    http_server.answers["/v1/models"] = answer

    with pytest.raises(TargetError, match="does not answer as OpenAI's"):
        await target.model()


async def test_the_error_of_an_unreachable_server_names_its_address() -> None:
    async with http_client("http://127.0.0.1:1", None, None) as http:
        with pytest.raises(TargetError, match=r"no connection to http://127\.0\.0\.1:1"):
            await OpenAITarget("http://127.0.0.1:1", http).model()
