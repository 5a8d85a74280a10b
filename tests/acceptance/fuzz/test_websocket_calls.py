"""What would be a finding over WebSocket is found."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from tests.acceptance.fuzz.websocket_calls import Frames, converse

CHAT = json.dumps({"messages": []}).encode()
STREAM = json.dumps({"messages": [], "stream": True}).encode()
ANSWER, ERROR = '{"choices": []}', '{"error": {}}'
Server = Callable[[str | bytes], Sequence[str]]


@contextmanager
def serving(answers: Server, close_code: int | None = None) -> Iterator[str]:
    """A server that answers each message so, or closes the connection after the first one."""

    def handle(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed, UnicodeDecodeError):
            for message in connection:
                for answer in answers(message):
                    connection.send(answer)
                if close_code is not None:
                    connection.close(close_code)

    with serve(handle, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def problems(message: str, is_stream: bool) -> Iterator[str]:
    if "choices" not in message and "error" not in message:
        yield "another schema"


def in_sync(message: str | bytes) -> Sequence[str]:
    return [ANSWER, "[DONE]"] if "stream" in str(message) else [ANSWER]


@pytest.mark.parametrize(
    ("server", "close_code", "body", "frames", "found"),
    [
        (in_sync, None, CHAT, Frames.WHOLE, []),
        (in_sync, None, STREAM, Frames.WHOLE, []),
        (in_sync, None, STREAM, Frames.FRAGMENTS, []),
        (in_sync, None, STREAM, Frames.TWICE, []),
        (in_sync, None, CHAT, Frames.LEFT, []),
        (lambda _: [ERROR], None, STREAM, Frames.WHOLE, []),
        (lambda _: ["{}"], None, CHAT, Frames.WHOLE, ["another schema"]),
        (lambda _: [ANSWER, "[DONE]"], None, CHAT, Frames.WHOLE, ["after the answer: another schema"]),
        (in_sync, 1011, CHAT, Frames.WHOLE, ["the connection is closed with 1011"]),
        (in_sync, 1008, CHAT, Frames.TWICE, ["the connection is closed with 1008"]),
        (in_sync, 1008, CHAT, Frames.THRICE, []),
        (lambda _: [], 1003, CHAT, Frames.BYTES, []),
        (in_sync, None, CHAT, Frames.BYTES, ["the connection is not closed with 1003"]),
        (in_sync, None, b"\xed\xa0\x80", Frames.WHOLE, []),
    ],
)
def test_answers_that_are_not_documented_are_found(
    server: Server, close_code: int | None, body: bytes, frames: Frames, found: list[str]
) -> None:
    with serving(server, close_code) as url:
        assert converse(url, {}, body, frames, CHAT, problems)[1] == found
