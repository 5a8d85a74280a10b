"""Requests as clients of other versions of HTTP send them."""

import asyncio
import gzip
import json
from collections.abc import Sequence

import pytest

from gateway_harness import Harness, encoded
from scripted_scheduler import answer_with
from tiny_model import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZE = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "hello world"}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
CLOSE = b"connection: close\r\n"


@pytest.fixture
def quire(shared: Harness) -> Harness:
    return shared


async def answers(quire: Harness, parts: Sequence[bytes]) -> bytes:
    """What the gateway sends until it closes the connection, if the parts arrive one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", quire.gateway.http_port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    "parts",
    [
        [TOKENIZE + OFFER + LENGTH + b"\r\n" + BODY],
        [TOKENIZE + OFFER + LENGTH + b"\r\n", BODY],
        [TOKENIZE + OFFER[:50], OFFER[50:] + LENGTH + b"\r\n" + BODY[:5], BODY[5:]],
        [TOKENIZE + OFFER + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)],
        [TOKENIZE + OFFER + b"a: %s\r\n" % (b"x" * 1_000) + LENGTH + b"\r\n" + BODY],
        [TOKENIZE + OFFER + b"connection: keep-alive\r\n" + LENGTH + b"\r\n" + BODY],
    ],
    ids=["at once", "body later", "in parts", "chunks", "long head", "two headers of the connection"],
)
async def test_a_client_that_offers_http_2_is_answered_in_http_1(parts: list[bytes], quire: Harness) -> None:
    received = await answers(quire, [*parts, TOKENIZE + CLOSE + LENGTH + b"\r\n" + BODY])
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b'"count":2') == 2


async def test_an_offer_of_http_2_does_not_lift_the_bounds_of_a_head(quire: Harness) -> None:
    received = await answers(quire, [TOKENIZE + OFFER + b"a: b\r\n" * 130 + LENGTH + b"\r\n" + BODY])
    assert received.startswith(b"HTTP/1.1 431 ")


async def test_a_compressed_body_is_refused_by_the_header_that_names_it(quire: Harness) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await quire.http.post("/tokenize", content=gzip.compress(BODY), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (415, "unsupported_media_type", "Content-Encoding")


async def test_a_body_may_be_named_as_not_compressed(quire: Harness) -> None:
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert (await quire.http.post("/tokenize", content=BODY, headers=headers)).status_code == 200


async def test_a_stream_for_a_client_of_http_1_0_has_no_chunks(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    body = b'{"prompt": "a", "stream": true}'
    head = TOKENIZE.replace(b"/tokenize HTTP/1.1", b"/v1/completions HTTP/1.0")
    received = await answers(quire, [head + b"content-length: %d\r\n\r\n%s" % (len(body), body)])
    fields, _, events = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields.lower()
    assert b"connection: close" in fields.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_a_whole_answer_for_a_client_of_http_1_0_has_its_length(quire: Harness) -> None:
    received = await answers(quire, [TOKENIZE.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH + b"\r\n" + BODY])
    fields, _, body = received.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in fields
    assert json.loads(body)["count"] == 2


async def test_head_of_http_1_0_has_no_body(quire: Harness) -> None:
    received = await answers(quire, [b"HEAD /version HTTP/1.0\r\nhost: localhost\r\n\r\n"])
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert received.endswith(b"\r\n\r\n")
