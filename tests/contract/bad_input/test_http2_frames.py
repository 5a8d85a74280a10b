"""Frames of HTTP/2 at the gRPC port that no gRPC client sends: the call ends with a status, or the connection does."""

import asyncio
import base64
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from google.rpc import error_details_pb2, status_pb2
from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from gateway_harness import Harness
from quire.inference.v1 import inference_pb2 as api

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = SettingsFrame(0).serialize()
PATH = "/quire.inference.v1.InferenceService/Generate"
CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": PATH,
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}
MESSAGE = api.GenerateRequest().SerializeToString()
PING = PingFrame(0, b"12345678").serialize()

Outcome = tuple[int, str] | str
PROMPTLESS: Outcome = (3, "INVALID_FIELD generation.prompt")  # the answer to an empty message
MALFORMED: Outcome = (3, "MALFORMED_MESSAGE")
# Of grpc itself, which gives no reason.
LATE: Outcome = (4, "")
TOO_LARGE: Outcome = (8, "")
UNIMPLEMENTED: Outcome = (12, "")
INTERNAL: Outcome = (13, "")
ENDS: Outcome = "ends"
IGNORED: Outcome = "ignored"


def block(*more: tuple[str, str], **changes: str | None) -> bytes:
    """A header block: the call's headers with some changed, None for one that is left out."""
    names = {"method": ":method", "scheme": ":scheme", "path": ":path", "te": "te", "type": "content-type"}
    changed = {names[name]: value for name, value in changes.items()}
    headers = [(name, changed.get(name, value)) for name, value in CALL.items()]
    given = [(name, value) for name, value in headers if value is not None]
    encoded: bytes = Encoder().encode([*given, *more], huffman=False)
    return encoded


def headers(data: bytes, stream: int = 1, *flags: str) -> bytes:
    serialized: bytes = HeadersFrame(stream, data, flags=["END_HEADERS", *flags]).serialize()
    return serialized


def data(content: bytes, stream: int = 1, *flags: str) -> bytes:
    serialized: bytes = DataFrame(stream, content, flags=flags).serialize()
    return serialized


def message(content: bytes, compressed: int = 0, length: int | None = None) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", compressed, len(content) if length is None else length) + content


def call(content: bytes, *more: tuple[str, str], **changes: str | None) -> bytes:
    """A whole call, with this as its data."""
    return headers(block(*more, **changes)) + data(content, 1, "END_STREAM")


def raw(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """A frame of any kind, with any length."""
    return (
        struct.pack(">I", len(body) if length is None else length)[1:] + struct.pack(">BBI", kind, flags, stream) + body
    )


async def outcome(port: int, sent: bytes) -> Outcome:
    """The gRPC status of the first call with reason and field, or `reset` with the error's code, or `ends` where the
    connection does, or `ignored` where a ping after what was sent is answered first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    decoder = Decoder()
    try:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(sent)
            while True:
                frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
                frame.parse_body(memoryview(await reader.readexactly(length)))
                match frame:
                    case HeadersFrame():
                        received = {str(name): str(value) for name, value in decoder.decode(frame.data, raw=False)}
                        if received.get("grpc-status") == "14":
                            break  # what a call gets whose connection ends
                        if "grpc-status" in received:
                            return int(received["grpc-status"]), details(received.get("grpc-status-details-bin"))
                    case RstStreamFrame():
                        return f"reset {frame.error_code}"
                    case GoAwayFrame():
                        break
                    case PingFrame() if "ACK" in frame.flags:
                        return "ignored"
        return "ends"
    finally:
        writer.close()


def details(encoded: str | None) -> str:
    """Reason and field of grpc-status-details-bin."""
    if not encoded:
        return ""
    status = status_pb2.Status.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))
    info, violation = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(violation)
    return " ".join([info.reason, *(one.field for one in violation.field_violations)])


GOOD = PREFACE + SETTINGS
CASES: dict[str, tuple[Callable[[], bytes], Outcome]] = {
    "a good call": (lambda: GOOD + call(message(MESSAGE)), PROMPTLESS),
    "HTTP/1.1": (lambda: b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", ENDS),
    "zero bytes": (lambda: b"\0" * 100, ENDS),
    "a TLS hello": (lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200, ENDS),
    "half a preface": (lambda: PREFACE[:12] + b"x" * 50, ENDS),
    "a preface and noise": (lambda: PREFACE + b"\xff" * 100, ENDS),
    "no settings": (lambda: PREFACE + call(message(MESSAGE)), ENDS),
    # Frames.
    "a frame that is too large": (lambda: GOOD + raw(0, 0, 1, b"", 2**24 - 1), ENDS),
    "an unknown kind of frame": (lambda: GOOD + raw(0xEE, 0, 0, b"abc") + call(message(MESSAGE)), PROMPTLESS),
    "data without headers": (lambda: GOOD + data(message(MESSAGE)) + PING, IGNORED),
    "data of stream 0": (lambda: GOOD + raw(0, 0, 0, b"abc") + PING, IGNORED),
    "headers of stream 0": (lambda: GOOD + raw(1, 4, 0, block()) + PING, IGNORED),
    "headers of an even stream": (lambda: GOOD + headers(block(), 2, "END_STREAM") + PING, IGNORED),
    "an older stream": (lambda: GOOD + headers(block(), 5) + headers(block(), 3) + PING, IGNORED),
    "a stream twice": (lambda: GOOD + headers(block()) + headers(block()), ENDS),
    "settings of a stream": (lambda: GOOD + raw(4, 0, 1, b""), ENDS),
    "settings of a bad length": (lambda: GOOD + raw(4, 0, 0, b"abc"), ENDS),
    "acknowledged settings with a body": (lambda: GOOD + raw(4, 1, 0, b"\0" * 6), ENDS),
    "a bad push setting": (lambda: GOOD + raw(4, 0, 0, struct.pack(">HI", 2, 7)), ENDS),
    "a window over 2^31": (lambda: GOOD + raw(4, 0, 0, struct.pack(">HI", 4, 2**32 - 1)), ENDS),
    "a frame size below the least": (lambda: GOOD + raw(4, 0, 0, struct.pack(">HI", 5, 1)), ENDS),
    "a ping of a stream": (lambda: GOOD + raw(6, 0, 1, b"\0" * 8), IGNORED),
    "a ping of a bad length": (lambda: GOOD + raw(6, 0, 0, b"\0" * 7), ENDS),
    "a window of 0": (lambda: GOOD + raw(8, 0, 0, b"\0" * 4), ENDS),
    "a window of a bad length": (lambda: GOOD + raw(8, 0, 0, b"\0" * 3), ENDS),
    "a window that overflows": (lambda: GOOD + WindowUpdateFrame(0, 2**31 - 1).serialize() * 2 + PING, IGNORED),
    "a reset of stream 0": (lambda: GOOD + raw(3, 0, 0, b"\0" * 4) + PING, IGNORED),
    "a reset of a bad length": (lambda: GOOD + headers(block()) + raw(3, 0, 1, b"\0" * 3), ENDS),
    "a reset of an idle stream": (lambda: GOOD + raw(3, 0, 7, b"\0" * 4) + call(message(MESSAGE)), PROMPTLESS),
    "a goaway of a bad length": (lambda: GOOD + raw(7, 0, 0, b"\0" * 3), ENDS),
    "a priority of a bad length": (lambda: GOOD + raw(2, 0, 1, b"\0") + call(message(MESSAGE)), PROMPTLESS),
    "a stream that depends on itself": (
        lambda: GOOD + PriorityFrame(1, depends_on=1, stream_weight=1).serialize() + call(message(MESSAGE)),
        PROMPTLESS,
    ),
    "a push": (lambda: GOOD + PushPromiseFrame(1, 2, block(), flags=["END_HEADERS"]).serialize() + PING, IGNORED),
    "padding that is too long": (lambda: GOOD + headers(block()) + raw(0, 0x9, 1, b"\xff" + b"a" * 5), "reset 1"),
    "headers and long padding": (lambda: GOOD + raw(1, 0xC, 1, b"\xff" + block()), INTERNAL),
    # Header blocks.
    "a continuation without headers": (
        lambda: GOOD + ContinuationFrame(1, block(), flags=["END_HEADERS"]).serialize(),
        ENDS,
    ),
    "data within headers": (lambda: GOOD + HeadersFrame(1, block()).serialize() + data(b"abc"), ENDS),
    "a continuation of another stream": (
        lambda: GOOD + HeadersFrame(1, block()).serialize()
        + ContinuationFrame(3, b"", flags=["END_HEADERS"]).serialize(),
        ENDS,
    ),
    "an unknown index": (lambda: GOOD + headers(b"\xff\xff\xff\x7f"), INTERNAL),
    "index 0": (lambda: GOOD + headers(b"\x80"), INTERNAL),
    "an integer without end": (lambda: GOOD + headers(b"\xff" * 50), INTERNAL),
    "a table that is too large": (lambda: GOOD + headers(b"\x3f\xff\xff\xff\x7f" + block()), INTERNAL),
    "a string that is cut off": (lambda: GOOD + headers(block() + b"\x40\x0aabc"), INTERNAL),
    "bad Huffman code": (lambda: GOOD + headers(block() + b"\x40\x84\xff\xff\xff\xff\x01a"), INTERNAL),
    "headers over the size of a frame": (
        lambda: GOOD + call(message(MESSAGE), ("a", "x" * 15_000), ("b", "x" * 15_000)),
        ENDS,
    ),
    # Headers of a call.
    "no method": (lambda: GOOD + call(message(MESSAGE), method=None), "reset 2"),
    "GET": (lambda: GOOD + call(message(MESSAGE), method="GET"), "reset 2"),
    "no path": (lambda: GOOD + call(message(MESSAGE), path=None), "reset 2"),
    "an empty path": (lambda: GOOD + call(message(MESSAGE), path=""), UNIMPLEMENTED),
    "an unknown method": (lambda: GOOD + call(message(MESSAGE), path=PATH + "s"), UNIMPLEMENTED),
    "an unknown service": (
        lambda: GOOD + call(message(MESSAGE), path="/quire.scheduler.v1.SchedulerService/Session"),
        UNIMPLEMENTED,
    ),
    "a path without a slash": (lambda: GOOD + call(message(MESSAGE), path="Generate"), UNIMPLEMENTED),
    "no content type": (lambda: GOOD + call(message(MESSAGE), type=None), PROMPTLESS),
    "JSON": (lambda: GOOD + call(message(b"{}"), type="application/json"), MALFORMED),
    "no te": (lambda: GOOD + call(message(MESSAGE), te=None), "reset 2"),
    "another te": (lambda: GOOD + call(message(MESSAGE), te="gzip"), INTERNAL),
    "no scheme": (lambda: GOOD + call(message(MESSAGE), scheme=None), "reset 2"),
    "an upper-case name": (lambda: GOOD + call(message(MESSAGE), ("A", "b")), INTERNAL),
    "an empty name": (lambda: GOOD + call(message(MESSAGE), ("", "b")), INTERNAL),
    "a line break in a value": (lambda: GOOD + call(message(MESSAGE), ("a", "b\r\nc")), PROMPTLESS),
    "a zero byte in a value": (lambda: GOOD + call(message(MESSAGE), ("a", "b\0c")), PROMPTLESS),
    "an unknown pseudo header": (lambda: GOOD + call(message(MESSAGE), (":a", "b")), INTERNAL),
    "a path twice": (lambda: GOOD + call(message(MESSAGE), (":path", "/b")), UNIMPLEMENTED),
    "a connection header": (lambda: GOOD + call(message(MESSAGE), ("connection", "close")), PROMPTLESS),
    "a bad time limit": (lambda: GOOD + call(message(MESSAGE), ("grpc-timeout", "soon")), INTERNAL),
    "a time limit of 0": (lambda: GOOD + call(message(MESSAGE), ("grpc-timeout", "0n")), LATE),
    "a time limit below 0": (lambda: GOOD + call(message(MESSAGE), ("grpc-timeout", "-1S")), INTERNAL),
    "an unknown encoding": (lambda: GOOD + call(message(MESSAGE, 1), ("grpc-encoding", "rot13")), INTERNAL),
    "bad binary metadata": (lambda: GOOD + call(message(MESSAGE), ("a-bin", "!!!")), INTERNAL),
    # Messages.
    "no message": (lambda: GOOD + headers(block(), 1, "END_STREAM"), MALFORMED),
    "half a head of a message": (lambda: GOOD + call(b"\0\0"), MALFORMED),
    "half a message": (lambda: GOOD + call(message(b"abc", length=10)), MALFORMED),
    "a message that is too large": (lambda: GOOD + call(message(b"abc", length=2**32 - 1)), TOO_LARGE),
    "a message that is larger than 4 MiB": (lambda: GOOD + call(message(b"abc", length=2**22 + 1)), TOO_LARGE),
    "two messages": (lambda: GOOD + call(message(MESSAGE) * 2), PROMPTLESS),
    "a bad flag": (lambda: GOOD + call(message(MESSAGE, 2)), PROMPTLESS),
    "compressed without an encoding": (lambda: GOOD + call(message(MESSAGE, 1)), INTERNAL),
    "bad gzip": (lambda: GOOD + call(message(b"abc", 1), ("grpc-encoding", "gzip")), INTERNAL),
    "data after the end": (lambda: GOOD + call(message(MESSAGE)) + data(b"abc"), PROMPTLESS),
    "headers after the end": (lambda: GOOD + call(message(MESSAGE)) + headers(block()), PROMPTLESS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_it_is_refused(case: tuple[Callable[[], bytes], Outcome], gateway: Harness) -> None:
    make, expected = case
    async with asyncio.timeout(60):
        received = await outcome(gateway.gateway.grpc_port, make())
    assert received == expected


async def test_a_connection_has_a_bound_on_its_streams(gateway: Harness) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.grpc_port)
    writer.write(GOOD)
    frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
    frame.parse_body(memoryview(await reader.readexactly(length)))
    assert isinstance(frame, SettingsFrame)
    assert frame.settings[SettingsFrame.MAX_CONCURRENT_STREAMS] == 4096
    writer.close()
