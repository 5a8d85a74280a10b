"""Calls over WebSocket: a message is the body of a POST to the same path, and each event of its answer is a message."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.errors import ErrorFormat, HttpError, HttpRejection
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.hosts import AllowedHosts
from gateway_svc.http_api.websocket_connection import SET_BODY, SET_RESPONDING
from gateway_svc.refusals import Refusal, Refuse, refusal_of, refusal_of_http
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import Share
from svc_common.errors import QuireError

# RFC 6455, and IANA's registry
_UNSUPPORTED_DATA, _POLICY_VIOLATION, _SERVICE_RESTART, _TRY_AGAIN_LATER = 1003, 1008, 1012, 1013
_MAX_OPEN = 2  # requests of a connection: one runs, one may wait
_KEY_PROTOCOL = "openai-insecure-api-key."
"""A subprotocol that has the caller's key, since web pages cannot set headers. The name is that of OpenAI's API."""
_OWN_HEADERS = {b"connection", b"upgrade", b"content-type", b"content-length", b"transfer-encoding"}
"""Headers of the connection that are not headers of its calls."""


def handshake(scope: Scope, receive: Receive, send: Send, errors: ErrorFormat) -> HttpExchange:
    """The request for a WebSocket. An answer to it refuses the WebSocket."""

    async def refuse(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return HttpExchange(scope, receive, refuse, 0, errors)


class WebSocketEndpoint:
    """An ASGI application for the WebSockets of one path."""

    def __init__(
        self,
        post: ASGIApp,
        calls: HttpCalls,
        hosts: AllowedHosts,
        origins: Collection[str],
        errors: ErrorFormat,
        refuse: Refuse,
    ) -> None:
        """`post` answers a POST to the path. `origins` are those of web pages that may connect, beside pages of this
        server; `*` is all. `refuse` counts refusals."""
        self._post = post
        self._calls = calls
        self._hosts = hosts
        self._origins = origins
        self._errors = errors
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request to connect
        offered: list[str] = scope["subprotocols"]
        keys = [each.removeprefix(_KEY_PROTOCOL) for each in offered if each.startswith(_KEY_PROTOCOL)]
        scope = {**scope, "headers": [*scope["headers"], *((b"x-api-key", key.encode("latin-1")) for key in keys)]}
        tenant = await self._admitted(scope, receive, send)
        if tenant is None:
            return
        # A browser takes no answer without one of the subprotocols that its page offered.
        chosen = next((each for each in offered if not each.startswith(_KEY_PROTOCOL)), None)
        scope["state"][SET_BODY](self._calls.body(tenant))
        waiting = self._calls.body(tenant)
        try:
            await send({"type": "websocket.accept", "subprotocol": chosen})
            await _Conversation(self._post, scope, receive, send, waiting, self._refuse).run()
        finally:
            waiting.release()

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> Tenant | None:
        """The caller, if it may connect. Otherwise it has been answered."""
        exchange = handshake(scope, receive, send, self._errors)
        try:
            self._hosts.check(exchange.header("Host"))
            self._check_origin(exchange)
            tenant = self._calls.login(exchange)
        except QuireError as error:
            self._count(refusal_of(error))
            await exchange.send_error(HttpError.of(error))
        except HttpRejection as rejection:
            self._count(refusal_of_http(rejection.error.code))
            await exchange.send_error(rejection.error)
        else:
            return tenant
        return None

    def _count(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refuse("websocket", refusal)

    def _check_origin(self, exchange: HttpExchange) -> None:
        """Raises HttpRejection for a web page of another site: browsers let it connect to any server."""
        origin = exchange.header("Origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            netloc = ""
        if not netloc or netloc.lower() != (exchange.header("Host") or "").lower():
            message = f"no page of {origin} may connect; QUIRE_CORS_ORIGINS can add it"
            raise HttpRejection(HttpError(403, "origin_not_allowed", message, "Origin"))


class _Conversation:
    """The calls of a connection, one after another. One further message may wait for its turn."""

    def __init__(self, post: ASGIApp, scope: Scope, receive: Receive, send: Send, body: Share, refuse: Refuse) -> None:
        """`body` takes the bytes of messages that wait. `refuse` counts refusals."""
        self._post = post
        self._body = body
        self._refuse = refuse
        self._receive = receive
        self._ws_send = send
        self._set_responding = scope["state"][SET_RESPONDING]
        self._scope = {
            **{name: scope[name] for name in ("asgi", "client", "path", "query_string", "server", "root_path")},
            "raw_path": scope.get("raw_path"),
            "path_params": scope.get("path_params", {}),
            "http_version": "1.1",
            "scheme": "https" if scope["scheme"] == "wss" else "http",
            "type": "http",
            "method": "POST",
        }
        self._headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _OWN_HEADERS]
        self._waiting: deque[bytes] = deque()
        self._num_open = 0  # requests that wait or run
        self._arrived = asyncio.Event()
        self._left = asyncio.Event()
        self._is_stream = False
        self._retry_after: bytes | None = None  # seconds, of an answer that is an error
        self._is_draining = False

    async def run(self) -> None:
        """Answers messages until the client, or the server, closes the connection."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._answer_all())
            await self._read()
            self._left.set()
            self._arrived.set()

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            text: str | None = message.get("text")
            if text is None:
                self._refuse("websocket", Refusal.MALFORMED)
                await self._close(_UNSUPPORTED_DATA, "a message is text: the JSON of a request")
                return
            if self._num_open == _MAX_OPEN:
                self._refuse("websocket", Refusal.CALLS)
                await self._close(_POLICY_VIOLATION, "one request runs and another one waits already")
                return
            body = text.encode()
            try:
                self._body.add(len(body))
            except QuireError as error:
                self._refuse("websocket", Refusal.BODY_BYTES)
                await self._close(_TRY_AGAIN_LATER, str(error))
                return
            self._num_open += 1
            self._waiting.append(body)
            self._arrived.set()

    async def _answer_all(self) -> None:
        while not self._left.is_set():
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            self._set_responding(True)
            await self._answer()
            self._set_responding(False)
            self._num_open -= 1

    async def _answer(self) -> None:
        body = self._waiting.popleft()
        self._body.resize(sum(map(len, self._waiting)))  # the call counts its own body
        parts = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        headers = [*self._headers, (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        del body  # its memory is free once it is parsed
        await self._post({**self._scope, "headers": headers, "state": {}}, receive, self._send)
        if self._is_draining:
            await self._close(_SERVICE_RESTART, "this gateway ends; another connection may lead to another one")

    async def _send(self, message: Message) -> None:
        """Sends what an HTTP connection would send."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers[b"content-type"].startswith(b"text/event-stream")
            self._is_draining = headers.get(b"connection") == b"close"
            self._retry_after = headers.get(b"retry-after")
            return
        body: bytes = message["body"]
        if self._retry_after is not None:
            body = b'{"retry_after":%s,%s' % (self._retry_after, body.removeprefix(b"{"))
        for data in _messages(body) if self._is_stream else (body,):
            await self._send_to_client({"type": "websocket.send", "text": data.decode()})

    async def _close(self, code: int, reason: str) -> None:
        await self._send_to_client({"type": "websocket.close", "code": code, "reason": reason})

    async def _send_to_client(self, message: Message) -> None:
        if self._left.is_set():
            return
        with contextlib.suppress(OSError):  # the connection is lost, which ends the reading, too
            await self._ws_send(message)


def _messages(events: bytes) -> Iterator[bytes]:
    """The data of server-sent events. An event's id becomes the member `event_id`."""
    for event in events.split(b"\n\n"):
        event_id, data = b"", b""
        for line in event.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"id":
                event_id = value
            elif name == b"data":
                data = value
        if event_id and data.startswith(b"{"):
            yield b'{"event_id":"%s",%s' % (event_id, data[1:])
        elif data:
            yield data
