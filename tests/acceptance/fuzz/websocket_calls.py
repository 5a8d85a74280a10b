"""Generated bodies over WebSocket: as one message, in fragments, two at once, and as messages that are refused."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

WEBSOCKET_PATHS = ("/v1/chat/completions", "/v1/completions")
_SECONDS = 180.0
_DONE = "[DONE]"
_FRAGMENT = 7  # bytes, so that characters are divided
_MAX_FRAGMENTS = 1000  # the gateway takes 1,024

Problems = Callable[[str, bool], Iterator[str]]
"""What is wrong with a message: its text, and whether it is one of a stream."""


class Frames(StrEnum):
    """How a body is sent."""

    WHOLE = "whole"
    FRAGMENTS = "fragments"
    TWICE = "twice"
    """Without waiting for the answer to the first one."""
    THRICE = "thrice"
    """Which the gateway may refuse."""
    LEFT = "left"
    """The client leaves without its answer."""
    BYTES = "bytes"

    @property
    def num_sent(self) -> int:
        """How many messages are sent before an answer is read."""
        return {Frames.TWICE: 2, Frames.THRICE: 3}.get(self, 1)


def close_codes(body: bytes, frames: Frames) -> Sequence[CloseCode | None]:
    """How the gateway may end the connection, as docs/api.md says; None: it does not close it."""
    if frames is Frames.BYTES:
        return (CloseCode.UNSUPPORTED_DATA,)
    try:
        body.decode()
    except UnicodeDecodeError:
        return (CloseCode.INVALID_DATA,)
    return (None, CloseCode.POLICY_VIOLATION) if frames is Frames.THRICE else (None,)


def converse(
    url: str, headers: Mapping[str, str], body: bytes, frames: Frames, probe: bytes | None, problems: Problems
) -> tuple[str, list[str]]:
    """Sends a body on a connection of its own. Returns how that ended, and what was wrong.

    A connection that is open then answers `probe`, which is a request that streams nothing.
    Raises OSError and WebSocketException where there is no connection.
    """
    try:
        with connect(
            url, additional_headers=headers, proxy=None, open_timeout=_SECONDS, close_timeout=_SECONDS, max_size=None
        ) as connection:
            return _converse(connection, body, frames, probe, problems)
    except InvalidStatus as refused:
        status = refused.response.status_code
        return f"{status}", [] if 400 <= status < 500 else [f"a handshake is answered {status}"]


def _converse(
    connection: ClientConnection, body: bytes, frames: Frames, probe: bytes | None, problems: Problems
) -> tuple[str, list[str]]:
    found: list[str] = []
    codes = close_codes(body, frames)
    try:
        for _ in range(frames.num_sent):
            _send(connection, body, frames)
        if frames is Frames.LEFT:
            return "left", found
        for _ in range(frames.num_sent):
            found += _answer(connection, body, problems)
        if probe is not None and not found and None in codes:
            _send(connection, probe, Frames.WHOLE)
            found += [f"after the answer: {problem}" for problem in _answer(connection, probe, problems)]
    except ConnectionClosed as closed:
        code = None if closed.rcvd is None else closed.rcvd.code
        if code is None or code not in codes:
            found.append(f"the connection is closed with {code}")
        return f"closed with {code}", found
    except TimeoutError:
        found.append("no answer")
    if None not in codes and not found:
        found.append(f"the connection is not closed with {codes[0]}")
    return "answered", found


def _send(connection: ClientConnection, body: bytes, frames: Frames) -> None:
    if frames is Frames.BYTES:
        connection.send(body, text=False)
    elif frames is Frames.FRAGMENTS and body:
        size = max(_FRAGMENT, len(body) // _MAX_FRAGMENTS + 1)
        connection.send((body[first : first + size] for first in range(0, len(body), size)), text=True)
    else:
        connection.send(body, text=True)


def _answer(connection: ClientConnection, body: bytes, problems: Problems) -> list[str]:
    """Reads the answer to a body; what is wrong with it."""
    found: list[str] = []
    is_stream = _is_stream(body)
    while True:
        message = connection.recv(timeout=_SECONDS)
        if not isinstance(message, str):
            return [*found, "a message is not text"]
        if is_stream and message == _DONE:
            return found
        found += problems(message, is_stream)
        with suppress(ValueError):
            if is_stream and "error" not in json.loads(message):
                continue
        return found


def _is_stream(body: bytes) -> bool:
    try:
        parsed: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and parsed.get("stream") is True
