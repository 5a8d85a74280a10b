"""HTTP clients of commands. They are aiohttp's: its parser is compiled, and a load generator shares the processors with
the server.
"""

import json
import ssl
from urllib.parse import urlsplit

import aiohttp
import grpc

from quire_client.connection import check_api_key, is_loopback
from quire_client.errors import QuireError


def is_http_url(url: str) -> bool:
    """Whether an HTTP client can call it."""
    try:
        parsed = urlsplit(url)
        return parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # also of a port that is not a number
        return False


def base_url(url: str) -> str:
    """The URL before `/v1/…`; users give it with /v1, as OpenAI's clients take it, or without."""
    return url.rstrip("/").removesuffix("/v1")


def http_client(
    url: str,
    api_key: str | None,
    timeout: float | None,
    ca_file: str | None = None,
    connect_timeout: float | None = None,
) -> aiohttp.ClientSession:
    """A client with as many connections as there are requests, and no proxy to this machine.

    `timeout` bounds each request from its sending to the last byte of its response, `connect_timeout` the opening of a
    connection, both in seconds. A server with TLS has a certificate of a CA in `ca_file`; None: of one of the system's.
    Raises QuireError for a file that cannot be used, or a key that no header holds.
    """
    check_api_key(api_key)
    parsed = urlsplit(url)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=_trusting(ca_file) if ca_file else True),
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=connect_timeout),
        trust_env=not is_loopback(f"{parsed.hostname}:{parsed.port}"),
    )


def error_message(status: int, body: bytes) -> str:
    """The message of OpenAI's error body, or else the status."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {status}"


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one too
        why = f"QUIRE_CA_FILE: {ca_file}: {(error.strerror or str(error)).lower()}"
        status = grpc.StatusCode.INVALID_ARGUMENT
        raise QuireError(status, status.name, why) from error
