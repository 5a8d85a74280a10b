"""Channels between services."""

import asyncio

import grpc

from svc_common.server import INTERNAL_MESSAGE_BYTES

_OPTIONS = (
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted service is reached again as soon as it listens, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Services connect directly, without a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)


_TLS_ERRORS = ("ssl", "certificate", "verification check")
"""Parts of gRPC's texts, which has no status for a failed handshake."""
_CLOSED_AT_ONCE = ("last error: ", "socket closed")
"""Parts of gRPC's text where a server closes a new connection, as one does that rejects the certificate: with TLS 1.3
gRPC reports nothing else of that. The text about a connection that had calls has no "last error".
"""


def internal_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str | None = None
) -> grpc.aio.Channel:
    """A channel to a service at `host:port`. It carries 64 MiB messages and notices a dead peer in 30 s.

    With `credentials` it uses TLS, and the server's certificate has `server_name`.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def is_credential_error(error: Exception, *, has_credential: bool) -> bool:
    """Whether a call failed since one side did not accept the other's credential, as far as the error says so.

    `has_credential`: the caller sends one. Without any, a proxy may have closed the connection.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return True
    text = (error.details() or "").lower()
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return any(part in text for part in _TLS_ERRORS) or (
        has_credential and all(part in text for part in _CLOSED_AT_ONCE)
    )


def end_if_cancelled() -> None:
    """Raises CancelledError if the task was cancelled: a call that fails at that moment raises its own error."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
