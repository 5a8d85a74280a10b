"""A WebSocket connection of the HTTP port: uvicorn's, which counts among the port's connections.

A message has a largest size, which is a setting of uvicorn's, and a time within which it is complete.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import State

from gateway_svc.http_api.connection_limits import ConnectionLimits, CountedConnection
from gateway_svc.refusals import Protocol, Refusal
from gateway_svc.tenant_shares import Share
from svc_common.errors import QuireError

SET_RESPONDING = "set_responding"
"""In the state of a scope: a function that takes whether a request is in progress."""

SET_BODY = "set_body"
"""In the state of a scope: a function that takes a Share, which counts the bytes of a message that arrives, until the
connection ends.
"""

_MAX_FRAGMENTS = 1024  # of a message: each takes memory, also an empty one
_MAX_QUEUED = 8  # messages of one read that the app has not taken; it closes a connection with three requests
_CLOSE_SECONDS = 10.0
"""For a client to read what was sent before its connection ended. Then the rest is discarded."""


class BoundedWebSocket(CountedConnection, WebSocketsSansIOProtocol):
    """Where there are too many connections, it may be closed while it has no request in progress."""

    protocol: Protocol = "websocket"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """`config` also has `limits`."""
        super().__init__(config, *args, **kwargs)
        self._limits: ConnectionLimits = config.limits
        self._has_request = False
        self._closes_after_answer = False
        self._body: Share | None = None
        self._message_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._limits.admit(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._body is not None:
            self._body.release()
        self.connections.add(self)  # the next call removes it, and fails where close() has done so
        super().connection_lost(exc)

    def close(self) -> None:
        self._limits.forget(self, self._address)
        self.connections.discard(self)
        self.transport.abort()

    @property
    def is_responding(self) -> bool:
        return self._has_request

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            state: dict[str, Any] = self.scope["state"]
            state[SET_RESPONDING] = self._set_responding
            state[SET_BODY] = self._set_body

    def shutdown(self) -> None:
        """Closes the connection as the server ends; after its answer, if one is in progress."""
        if self._has_request:
            self._closes_after_answer = True
        elif self.close_sent or self.conn.state is not State.OPEN:
            self.transport.close()  # what was sent is still delivered; a closing handshake may never end
        else:
            super().shutdown()

    async def send(self, message: Any) -> None:
        if self.close_sent and message["type"] in ("websocket.send", "websocket.close"):
            raise ClientDisconnected
        await super().send(message)
        # uvicorn would take a handshake that was refused for one that was forgotten.
        self.handshake_complete |= self.close_sent

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > _MAX_FRAGMENTS:
            self._fail(f"the message has more than {_MAX_FRAGMENTS} fragments", Refusal.TOO_LARGE)

    def handle_ping(self) -> None:
        """Answers the pings of one read. A client that does not read gets no answers: a ping may stay without one if
        another follows (RFC 6455, 5.5.3).
        """
        pongs = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(pongs))

    def handle_close(self, event: Frame) -> None:
        if self.disconnected:  # it is being closed
            return
        super().handle_close(event)
        if not self.close_sent:  # the client closes first
            self._end_calls()

    def handle_parser_exception(self) -> None:
        is_too_large = isinstance(self.conn.parser_exc, PayloadTooBig)
        self._limits.refuse("websocket", Refusal.TOO_LARGE if is_too_large else Refusal.MALFORMED)
        super().handle_parser_exception()
        self._end_calls()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._end_calls()

    def send_receive_event_to_app(self) -> None:
        self._stop_waiting()  # the message is complete
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # uvicorn would log a stack trace for it
                self._fail("the message is not UTF-8", Refusal.MALFORMED, CloseCode.INVALID_DATA)
                return
        if self.queue.qsize() >= _MAX_QUEUED:
            self._fail(f"more than {_MAX_QUEUED} messages came at once", Refusal.CALLS)
            return
        super().send_receive_event_to_app()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.close_sent:
            self._refuse_handshake()
        if not self.frames and not self._has_begun_frame():
            self._stop_waiting()
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self._limits.read_timeout, self._message_is_late)

        self._count_message()

    def _has_begun_frame(self) -> bool:
        """Whether a frame has begun that is not complete. The buffer may be empty all the same: the parser takes each
        part of a frame's head out of it.
        """
        parser: Any = self.conn.parser
        while parser is not None:
            if parser.gi_code is Frame.parse.__code__:
                return True
            parser = parser.gi_yieldfrom
        return False

    def _set_body(self, body: Share) -> None:
        self._body = body

    def _count_message(self) -> None:
        """Counts the bytes of a message that is not complete."""
        if self._body is None:
            return
        try:
            self._body.resize(len(self.conn.reader.buffer) + sum(map(len, self.frames)))
        except QuireError as error:
            self._body.release()
            self._fail(str(error), Refusal.BODY_BYTES, CloseCode.TRY_AGAIN_LATER)

    def _set_responding(self, value: bool) -> None:
        self._has_request = value
        if value:
            self.count_as_busy()
        else:
            self.count_as_idle()
            if self._closes_after_answer:
                self.shutdown()

    def _refuse_handshake(self) -> None:
        """Answers a request that the HTTP parser took, and that of WebSockets, with smaller bounds, does not."""
        self._limits.refuse("websocket", Refusal.MALFORMED)
        text = b"a WebSocket's handshake has no body, and no header of more than 8192 bytes\n"
        self.transport.write(
            STATUS_LINE[400]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n%s" % (len(text), text)
        )
        self.handshake_complete = self.close_sent = True
        self.transport.close()

    def _end_calls(self) -> None:
        """Ends the app's calls at once, also one that waits for the client to read. The transport is closing: that ends
        when the client has read what was sent, which may be never, so it is aborted after a while.
        """
        self.disconnected = True  # send() raises ClientDisconnected
        self.writable.set()
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _message_is_late(self) -> None:
        self._message_timer = None
        self._fail("the message did not come in time", Refusal.TOO_LATE)

    def _fail(self, reason: str, refusal: Refusal, code: CloseCode = CloseCode.POLICY_VIOLATION) -> None:
        if self.transport.is_closing():
            return
        self._limits.refuse("websocket", refusal)
        if self.close_sent:  # the client goes on sending
            self.transport.close()
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()
        self._end_calls()

    def _stop_waiting(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
