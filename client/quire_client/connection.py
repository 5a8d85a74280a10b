"""How a client reaches a server: addresses, options of the channel, metadata and deadline of each call."""

import codecs
import json
import math
import os
import ssl
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from quire_client.errors import local_error

DEFAULT_ADDRESS = "127.0.0.1:50051"


def _version() -> str:
    """The version of the package that has this module: with the services, or the client alone."""
    for package in ("quire", "quire-client"):
        with suppress(PackageNotFoundError):
            return version(package)
    return "0+unknown"  # run from a checkout that is not installed


__version__ = _version()

# Spreads calls over all addresses of a name. There is no retryPolicy: it does not know other gateways or reasons of
# errors; resumable_stream.py does. There is no healthCheckConfig: it would hide a gateway's own reason for not serving.
_SERVICE_CONFIG: dict[str, list[dict[str, dict[str, str]]]] = {"loadBalancingConfig": [{"round_robin": {}}]}

_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.primary_user_agent", f"quire-client/{__version__}"),
    # A dead connection is detected within 25 s. Servers accept one ping in 10 s.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted gateway is reached again as soon as it listens, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # The server limits requests; the size of a response follows from the request.
    ("grpc.max_receive_message_length", -1),
)


class Closeable(ABC):
    """A client or a stream, usable in `with`."""

    @abstractmethod
    def close(self) -> None:
        """Cancels its requests, and closes a client's connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncCloseable(ABC):
    """The same for asyncio."""

    @abstractmethod
    async def aclose(self) -> None:
        """Cancels its requests, and closes a client's connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """How to call. Each of `addresses` is `host:port`, or any target that grpc resolves (`dns:///name:port`)."""

    addresses: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None
    timeout: float | None
    api_key: str | None = field(repr=False)

    @classmethod
    def resolve(
        cls,
        address: str | None,
        credentials: grpc.ChannelCredentials | None,
        timeout: float | None,
        api_key: str | None,
    ) -> "Connection":
        """Fills what is None from QUIRE_ADDRESS, QUIRE_CA_FILE and QUIRE_API_KEY; commas separate addresses.

        Raises QuireError for a key that no header holds, for a URL as an address, or a file that cannot be read, and as
        `timeout_of`.
        """
        api_key = api_key or os.environ.get("QUIRE_API_KEY") or None
        check_api_key(api_key)
        listed = (address or os.environ.get("QUIRE_ADDRESS") or DEFAULT_ADDRESS).split(",")
        addresses = tuple(filter(None, map(str.strip, listed)))
        for one in addresses:
            check_address(one)
        return cls(addresses or (DEFAULT_ADDRESS,), credentials or _ca_credentials(), timeout_of(timeout), api_key)

    @property
    def name(self) -> str:
        """All addresses, for a message."""
        return ", ".join(self.addresses)

    def metadata(self, traceparent: str | None) -> Metadata:
        """The metadata of a call."""
        pairs = []
        if self.api_key:
            pairs.append(("authorization", f"Bearer {self.api_key}"))
        if traceparent:
            pairs.append(("traceparent", traceparent))
        return tuple(pairs)

    def deadline(self, timeout: float | None) -> float | None:
        """The timeout of a call in seconds: its own, or else the client's. Raises as `timeout_of`."""
        return self.timeout if timeout is None else timeout_of(timeout)


def timeout_of(seconds: float | None) -> float | None:
    """A timeout for calls; None, also for infinity: there is no limit.

    Raises TypeError for what is no number, ValueError for NaN and for more than the platform can wait.
    """
    if seconds is None or seconds == math.inf:
        return None
    if not isinstance(seconds, Real):
        raise TypeError(f"timeout must be a number of seconds, not {type(seconds).__name__}")
    if not math.isfinite(seconds) or seconds > threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout is {seconds}: it must be a number of seconds up to {threading.TIMEOUT_MAX:.0f}, or inf"
        )
    return float(seconds)


def check_address(address: str, what: str = "the gateway's port for gRPC") -> None:
    """Raises QuireError for a URL of HTTP, which grpc takes for a name to look up."""
    if address.lower().startswith(("http://", "https://")):
        why = f"{address} is a URL: an address is host:port, of {what}"
        raise local_error(grpc.StatusCode.INVALID_ARGUMENT, why)


def check_api_key(api_key: str | None) -> None:
    """Raises QuireError for a key that no header holds."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise local_error(grpc.StatusCode.UNAUTHENTICATED, "the API key holds characters that cannot be sent")


def _ca_credentials() -> grpc.ChannelCredentials | None:
    """Credentials for TLS with the CA certificates in QUIRE_CA_FILE; None: it is not set."""
    path = os.environ.get("QUIRE_CA_FILE")
    if not path:
        return None
    return grpc.ssl_channel_credentials(read_ca_file("QUIRE_CA_FILE", Path(path), grpc.StatusCode.INVALID_ARGUMENT))


def read_file(what: str, path: Path, status: grpc.StatusCode) -> bytes:
    """The content of a file of credentials. Raises QuireError with this status, which names what the file is."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise local_error(status, f"{what}: {path}: {(error.strerror or str(error)).lower()}") from error


def read_pem(what: str, path: Path, status: grpc.StatusCode) -> bytes:
    """The same of a key or certificates, without the byte order mark, with which gRPC finds nothing in them."""
    return read_file(what, path, status).removeprefix(codecs.BOM_UTF8)


def read_ca_file(what: str, path: Path, status: grpc.StatusCode) -> bytes:
    """The same of CA certificates. Raises QuireError also where there is none."""
    content = read_pem(what, path, status)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise local_error(status, f"{what}: {path} has no certificate in PEM format") from error
    return content


def channel_options(address: str) -> tuple[tuple[str, str | int], ...]:
    """Options of the channel to an address."""
    if is_loopback(address):
        # A proxy of the environment cannot reach this machine's loopback.
        return (*_OPTIONS, ("grpc.enable_http_proxy", 0))
    return _OPTIONS


def is_loopback(address: str) -> bool:
    """Whether `host:port` names this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
