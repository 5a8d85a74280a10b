"""One HTTP request and its response, over ASGI: a limit on the body, JSON, server-sent events, and a client that
leaves."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

from opentelemetry.context import Context
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from gateway_svc.call_limits import OpenCall
from gateway_svc.http_api.errors import COMPRESSED, LATE_BODY, NOT_JSON, ErrorFormat, HttpError, HttpRejection
from gateway_svc.http_api.events import to_json
from gateway_svc.http_api.undefined_fields import IGNORED_FIELDS_HEADER, header_value
from gateway_svc.request_group import ClientDisconnected
from svc_common.errors import QuireError, Reason

MAX_BODY_BYTES = 16 * 2**20
CLIENT_DISCONNECTED = 499
"""The outcome of a call whose response did not begin, or did not end."""
REQUEST_ID_HEADER, OWN_ID_HEADER = "x-request-id", "x-quire-request-id"
DRAIN = "drain"
"""In the state of a scope: a function without arguments that waits until little of what was sent is still in memory, or
the connection is lost.
"""
_CLIENT_ID = re.compile("[!-~]{1,128}")


class _ResponseStage(Enum):
    OPEN = "open"
    STREAMING = "streaming"
    DONE = "done"


class HttpExchange:
    """`peer` is the client's address. `status` is the response's, once it has begun. `context` is that of the
    request's span. `id_headers` are the headers of the response that have `request_id`; a client that sends its own
    X-Request-Id gets that back, and `request_id` in another header. `model` is the name of the request's model, empty
    where that is not served. `is_durable` is whether its requests are recorded; None: it has
    none. `ignored_fields` are names of fields of the body that have no effect. `open_call` counts the call from its
    login on; it has the bytes of the body. `num_body_bytes` is the size of the body that was read. The body must come
    within `read_timeout` seconds. With `takes_any_type` it may have any content type, unless a web page sends it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        read_timeout: float,
        errors: ErrorFormat,
        *,
        takes_any_type: bool = False,
    ) -> None:
        self.headers = Headers(scope=scope)
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.query = QueryParams(scope.get("query_string", b""))
        self.request_id = uuid.uuid4().hex
        self.id_headers: Sequence[str] = (REQUEST_ID_HEADER,)
        self.peer = ":".join(str(part) for part in scope.get("client") or ())
        self.status: int | None = None
        self._failure: int | None = None
        self.context: Context | None = None
        self.model = ""
        self.is_durable: bool | None = None
        self.ignored_fields: Sequence[str] = ()
        self.open_call: OpenCall | None = None
        self.num_body_bytes = 0
        self._body: bytes | None = None
        self._receive = receive
        self._send = send
        self._drain: Callable[[], Awaitable[None]] | None = scope.get("state", {}).get(DRAIN)
        self._read_timeout = read_timeout
        self._errors = errors
        self._takes_any_type = takes_any_type
        self._stage = _ResponseStage.OPEN
        self._sent_at = 0.0

    @property
    def outcome(self) -> int:
        """The status that the call is counted with: that of its response, or of the error that ended its stream."""
        return self._failure or self.status or CLIENT_DISCONNECTED

    def header(self, name: str) -> str | None:
        """A header's value. Raises QuireError where the request has it more than once: proxies and servers differ in
        which one they take."""
        values = self.headers.getlist(name)
        if len(values) > 1:
            raise QuireError(Reason.INVALID_FIELD, "is there more than once", field=name)
        return values[0] if values else None

    async def read_json(self, *, keep: bool = False) -> bytes:
        """The body, not parsed. Raises QuireError where it is too large, HttpRejection where it is of another
        content type, compressed or late, and ClientDisconnected. With `keep` the next call returns it again."""
        kept, self._body = self._body, None
        data = await self._read_json() if kept is None else kept
        if keep:
            self._body = data
        self.num_body_bytes = len(data)
        return data

    async def _read_json(self) -> bytes:
        # Browsers send other types, and none, to any server without asking it: a web page could post to a local one.
        # What they post has an Origin.
        is_json = (self.header("Content-Type") or "").partition(";")[0].strip().lower() == "application/json"
        if not is_json and not (self._takes_any_type and self.header("Origin") is None):
            raise HttpRejection(NOT_JSON)
        if (self.header("Content-Encoding") or "identity").strip().lower() != "identity":
            raise HttpRejection(COMPRESSED)
        # A Content-Length above the limit is enough to reject: the server discards the body.
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(self._read_timeout):
                return await self._read_body()
        except TimeoutError:
            raise HttpRejection(LATE_BODY) from None

    async def drain(self) -> None:
        """Waits until the client has received the answer, but for what the operating system and 64 KiB hold."""
        if self._drain is not None:
            await self._drain()

    def end(self) -> None:
        """After the answer: the call is counted no longer."""
        if self.open_call is not None:
            self.open_call.end()

    async def respond(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._start(status, content_type, {"content-length": str(len(body)), **(headers or {})})
        self._stage = _ResponseStage.DONE
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.respond(to_json(body), "application/json", status, headers)

    async def start_events(self) -> None:
        """Starts a stream of server-sent events."""
        await self.start_stream("text/event-stream; charset=utf-8")

    async def start_stream(self, content_type: str) -> None:
        """Starts a stream of another type. What is sent as events are its parts."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, content_type, headers)
        self._sent_at = time.monotonic()
        self._stage = _ResponseStage.STREAMING

    async def send_events(self, data: bytes) -> None:
        """Sends rendered events."""
        self._sent_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        """Ends the stream, after some last events."""
        self._stage = _ResponseStage.DONE
        await self._send({"type": "http.response.body", "body": data})

    async def fail_events(self, error: HttpError, data: bytes) -> None:
        """Ends the stream, which has failed, after some last events."""
        self._failure = error.status
        await self.end_events(data)

    def client_disconnected(self) -> None:
        """The client will not receive the rest of the answer."""
        if self._stage is not _ResponseStage.DONE:
            self._failure = CLIENT_DISCONNECTED

    async def send_error(self, error: HttpError) -> None:
        """Sends an error: as the response, or as the last event of a stream that has begun."""
        match self._stage:
            case _ResponseStage.OPEN:
                await self.respond_json(self._errors.body(error), error.status, error.headers)
            case _ResponseStage.STREAMING:
                await self.fail_events(error, self._errors.event(error))
            case _ResponseStage.DONE:
                pass  # the response had begun as a success, and cannot be changed

    @asynccontextmanager
    async def watch_disconnect(self, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
        """Calls `on_disconnect` if the client disconnects within the block. The body must have been read."""
        watch = asyncio.create_task(self._watch(on_disconnect))
        try:
            yield
        finally:
            watch.cancel()

    @asynccontextmanager
    async def keep_alive(self, seconds: float) -> AsyncIterator[None]:
        """Sends a comment whenever a stream had no event for so long within the block, so that no proxy closes it."""
        pings = asyncio.create_task(self._ping(seconds))
        try:
            yield
        finally:
            pings.cancel()

    async def _read_body(self) -> bytes:
        data = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            if len(data) + len(part) > MAX_BODY_BYTES:
                raise _too_large()
            if self.open_call is not None:
                self.open_call.body.add(len(part))
            data += part
            if not message.get("more_body", False):
                return bytes(data)

    async def _ping(self, seconds: float) -> None:
        while True:
            # One timer for each pause: one for each event would cost more than rendering the event.
            silence = time.monotonic() - self._sent_at
            if silence < seconds:
                await asyncio.sleep(seconds - silence)
            else:
                await self.send_events(b": ping\n\n")

    async def _watch(self, on_disconnect: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.status = status
        ids = {**dict.fromkeys(self.id_headers, self.request_id), **self._client_id()}
        every = {"content-type": content_type, **ids, **headers}
        if self.is_durable is not None:
            every["x-request-durable"] = "true" if self.is_durable else "false"
        if self.ignored_fields:
            every[IGNORED_FIELDS_HEADER] = header_value(self.ignored_fields)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _client_id(self) -> Mapping[str, str]:
        """The headers for a client's own id, such as a proxy's. It is no name of the request: others may have it."""
        given = self.headers.getlist(REQUEST_ID_HEADER)
        if len(given) != 1 or _CLIENT_ID.fullmatch(given[0]) is None:
            return {}
        return {REQUEST_ID_HEADER: given[0], OWN_ID_HEADER: self.request_id}


def _too_large() -> QuireError:
    return QuireError(Reason.MESSAGE_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")
