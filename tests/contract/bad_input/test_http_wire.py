"""Bytes at the HTTP port that are no request, and requests with a bad head or body."""

import asyncio
from contextlib import suppress

import pytest

from gateway_harness import Harness
from gateway_svc.http_api.connection import MAX_HEAD_BYTES, MAX_HEADERS
from gateway_svc.http_api.json_body import MAX_JSON_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = b"GET /live HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = b"content-type: application/json\r\n"
MIB = 2**20


def post(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return POST + JSON + lines + b"content-length: %d\r\n\r\n" % len(body) + body


# What is sent; status, and a part of the answer: the code, and the field if one is named.
BAD_REQUEST = (400, "")
CASES: dict[str, tuple[bytes, int, str]] = {
    # No HTTP.
    "zero bytes": (b"\0" * 100, *BAD_REQUEST),
    "a text": (b"hello\r\n\r\n", *BAD_REQUEST),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200, *BAD_REQUEST),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", *BAD_REQUEST),
    "Redis": (b"*1\r\n$4\r\nPING\r\n\r\n", *BAD_REQUEST),
    "a response": (b"HTTP/1.1 200 OK\r\n\r\n", *BAD_REQUEST),
    "no version": (b"GET /live\r\n\r\n", *BAD_REQUEST),
    "an unknown version": (b"GET /live HTTP/9.9\r\n\r\n", *BAD_REQUEST),
    "a lower-case version": (b"GET /live http/1.1\r\n\r\n", *BAD_REQUEST),
    "no path": (b"GET  HTTP/1.1\r\n\r\n", *BAD_REQUEST),
    "an unknown method": (b"STEAL /live HTTP/1.1\r\n\r\n", *BAD_REQUEST),
    "a control character in the path": (b"GET /li\x01ve HTTP/1.1\r\n\r\n", *BAD_REQUEST),
    "a space in the path": (b"GET /li ve HTTP/1.1\r\n\r\n", *BAD_REQUEST),
    # Headers.
    "no colon": (GET + b"host\r\n\r\n", *BAD_REQUEST),
    "a space before the colon": (GET + b"host : a\r\n\r\n", *BAD_REQUEST),
    "an empty name": (GET + b": a\r\n\r\n", *BAD_REQUEST),
    "a space in a name": (GET + b"a b: c\r\n\r\n", *BAD_REQUEST),
    "a zero byte in a value": (GET + b"a: b\0c\r\n\r\n", *BAD_REQUEST),
    "a line break in a value": (GET + b"a: b\rc\r\n\r\n", *BAD_REQUEST),
    "a folded header": (GET + b" a: b\r\n\r\n", *BAD_REQUEST),
    "a large value": (GET + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, ""),
    "a large name": (GET + b"a" * MAX_HEAD_BYTES + b": x\r\n\r\n", 431, ""),
    "a large path": (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431, ""),
    "many headers": (GET + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431, ""),
    "a bad host": (GET + b"host: a/b\r\n\r\n", 400, '"param":"Host"'),
    "another host": (GET + b"host: evil.example\r\n\r\n", 421, '"param":"Host"'),
    "two hosts": (GET + b"host: localhost\r\nhost: evil.example\r\n\r\n", 400, '"param":"Host"'),
    "an empty host": (GET + b"host:\r\n\r\n", 400, '"param":"Host"'),
    # How long the body is: what proxies and servers could read differently.
    "two lengths": (POST + JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", *BAD_REQUEST),
    "the same length twice": (POST + JSON + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}", *BAD_REQUEST),
    "length and chunks": (
        POST + JSON + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        *BAD_REQUEST,
    ),
    "chunks and length": (
        POST + JSON + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        *BAD_REQUEST,
    ),
    "a length below 0": (POST + JSON + b"content-length: -1\r\n\r\n", *BAD_REQUEST),
    "a length with a sign": (POST + JSON + b"content-length: +2\r\n\r\n{}", *BAD_REQUEST),
    "a length in hex": (POST + JSON + b"content-length: 0x2\r\n\r\n{}", *BAD_REQUEST),
    "a list of lengths": (POST + JSON + b"content-length: 2, 2\r\n\r\n{}", *BAD_REQUEST),
    "a huge length": (POST + JSON + b"content-length: 99999999999999999999999\r\n\r\n{}", *BAD_REQUEST),
    "a length over the bound": (POST + JSON + b"content-length: 16777217\r\n\r\n", 413, "message_too_large"),
    "an encoding after chunked": (POST + JSON + b"transfer-encoding: chunked, gzip\r\n\r\n2\r\n{}\r\n", *BAD_REQUEST),
    "chunks of a bad size": (POST + JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", *BAD_REQUEST),
    "chunks of a huge size": (POST + JSON + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n", *BAD_REQUEST),
    "a chunk below 0": (POST + JSON + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n", *BAD_REQUEST),
    "a short chunk": (POST + JSON + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", *BAD_REQUEST),
    # What a body is.
    "no content type": (POST + b"content-length: 2\r\n\r\n{}", 415, '"param":"Content-Type"'),
    "a form": (
        POST + b"content-type: multipart/form-data; boundary=a\r\ncontent-length: 2\r\n\r\n{}",
        415,
        '"param":"Content-Type"',
    ),
    "no body": (post(b""), 400, "malformed_message"),
    "compressed": (post(b"\x1f\x8b\x08\0", b"content-encoding: gzip"), 415, '"param":"Content-Encoding"'),
    "bytes": (post(bytes(range(256))), 400, "malformed_message"),
    "Latin-1": (post('{"prompt": "ä"}'.encode("latin-1")), 400, "malformed_message"),
    "an overlong form": (post(b'{"prompt": "\xc0\x80"}'), 400, "malformed_message"),
    "UTF-16": (post('{"prompt": "a"}'.encode("utf-16")), 400, "malformed_message"),
    "cut off": (post(b'{"prompt": "a'), 400, "malformed_message"),
    "a comma too many": (post(b'{"prompt": "a",}'), 400, "malformed_message"),
    "a comment": (post(b'{"prompt": "a"} // b'), 400, "malformed_message"),
    "two objects": (post(b"{}{}"), 400, "malformed_message"),
    "single quotes": (post(b"{'prompt': 'a'}"), 400, "malformed_message"),
    "a tab in a string": (post(b'{"prompt": "a\tb"}'), 400, "malformed_message"),
    "an unknown escape": (post(b'{"prompt": "\\x41"}'), 400, "malformed_message"),
    "a leading zero": (post(b'{"prompt": "a", "n": 01}'), 400, "malformed_message"),
    "a number without end": (post(b'{"prompt": "a", "x": ' + b"9" * 10_000 + b"}"), 400, "malformed_message"),
    "null": (post(b"null"), 400, "malformed_message"),
    "a list": (post(b"[]"), 400, "malformed_message"),
    "a string": (post(b'"prompt"'), 400, "malformed_message"),
    "infinity": (post(b'{"prompt": "a", "temperature": Infinity}'), 400, '"param":"temperature"'),
    "infinity elsewhere": (post(b'{"prompt": "a", "x": -Infinity}'), 400, "malformed_message"),
    "deep lists": (post(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400, "malformed_message"),
    "deep objects": (post(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), 400, "malformed_message"),
    "many values": (post(b'{"prompt": [' + b"[]," * MAX_JSON_TOKENS + b"[]]}"), 413, "message_too_large"),
    "a key twice": (post(b'{"prompt": "a", "prompt": "b"}'), 400, '"param":"prompt"'),
    "too large": (post(b'{"prompt": "' + b"a" * 16 * MIB + b'"}'), 413, "message_too_large"),
    # Other headers.
    "a bad name": (post(b'{"prompt": "a"}', b"idempotency-key: a b"), 400, '"param":"Idempotency-Key"'),
    "a long name": (post(b'{"prompt": "a"}', b"idempotency-key: " + b"a" * 129), 400, '"param":"Idempotency-Key"'),
    "an empty name of a request": (post(b'{"prompt": "a"}', b"idempotency-key:"), 400, '"param":"Idempotency-Key"'),
    "a bad time": (post(b'{"prompt": "a"}', b"x-request-timeout: soon"), 400, '"param":"x-request-timeout"'),
    "a place without a name": (post(b'{"prompt": "a"}', b"last-event-id: 1"), 400, '"param":"last-event-id"'),
    "another method": (POST.replace(b"POST", b"PUT") + b"\r\n", 405, "method_not_allowed"),
    "another address": (POST.replace(b"completions", b"..%2fetc") + b"content-length: 0\r\n\r\n", 404, "not_found"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_it_is_refused(case: tuple[bytes, int, str], gateway: Harness) -> None:
    sent, status, part = case
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.http_port)
    try:
        async with asyncio.timeout(60):
            with suppress(ConnectionError):  # it may refuse before it has read all
                writer.write(sent)
                await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert int(head.split()[1]) == status
            assert part in (await reader.read(2_000)).decode()
    finally:
        writer.close()
    assert (await gateway.http.get("/live")).status_code == 200
