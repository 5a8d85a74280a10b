"""HTTP clients of commands. They are aiohttp's: its parser is compiled, and a load generator shares the processors with
the server.
"""

import json
import ssl
from base64 import b64encode
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp
import grpc

from quire_client.connection import check_api_key, is_loopback
from quire_client.errors import QuireError, local_error


def is_http_url(url: str) -> bool:
    """Whether an HTTP client can call it."""
    try:
        parsed = urlsplit(url)
        return parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # also of a port that is not a number
        return False


def without_login(url: str) -> str:
    """The URL without user and password, for messages and calls: `http_client` sends them."""
    parsed = urlsplit(url)
    return parsed._replace(netloc=parsed.netloc.rpartition("@")[2]).geturl()


def base_url(url: str) -> str:
    """The URL before `/v1/…`, without user and password; users give it with /v1, as OpenAI's clients take it, or
    without.
    """
    return without_login(url).rstrip("/").removesuffix("/v1")


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
    Each call sends `api_key`, or user and password of the URL, as a proxy may ask for. Raises QuireError for both of
    them, for a file that cannot be used, and a key or user that no header holds.
    """
    check_api_key(api_key)
    parsed = urlsplit(url)
    authorization = _authorization(parsed, api_key)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=_trusting(ca_file) if ca_file else True),
        headers={"authorization": authorization} if authorization else None,
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=connect_timeout),
        trust_env=not is_loopback(f"{parsed.hostname}:{parsed.port}"),
    )


def error_message(status: int, body: bytes) -> str:
    """The message of OpenAI's error body, or else the status."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {status}"


def _authorization(url: SplitResult, api_key: str | None) -> str | None:
    user, password = unquote(url.username or ""), unquote(url.password or "")
    if not user and not password:
        return f"Bearer {api_key}" if api_key else None
    if api_key:
        raise _invalid("the URL has a user or password, and there is an API key: a call sends one of the two")
    if ":" in user:
        raise _invalid("the user in the URL must have no colon")
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


def _invalid(why: str) -> QuireError:
    return local_error(grpc.StatusCode.INVALID_ARGUMENT, why)


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one too
        raise _invalid(f"QUIRE_CA_FILE: {ca_file}: {(error.strerror or str(error)).lower()}") from error
