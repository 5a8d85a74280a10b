"""Addresses: read from settings, and checked before they are bound, so that errors name the address."""

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

MAX_PORT = 65535
_MAX_PATH_BYTES = 107  # of a Unix socket on Linux
_PROBE_SECONDS = 2.0


class CannotListen(Exception):  # noqa: N818
    """No process can listen on an address. The text names host and port, or the path."""


class AddressInUse(CannotListen):
    """An address on which another process listens."""


def _check_host(host: str) -> str:
    """Returns a host. Raises ValueError where no resolver takes its name."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{host} is not a host: each part of a name has 1 to 63 characters") from None
    return host


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and a port to connect to."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostPort":
        """The address in `host:port`, with brackets around an IPv6 address. Raises ValueError."""
        host, _, port = text.strip().rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if is_bracketed else host
        if not host or (":" in host) is not is_bracketed or len(host.split()) != 1:
            raise ValueError(f"{text!r} is not host:port, where an IPv6 address is in brackets")
        if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT):
            raise ValueError(f"the port of {text!r} is not a number from 1 to {MAX_PORT}")
        return cls(_check_host(host), int(port))

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)


def split_addresses(text: str) -> list[HostPort]:
    """The addresses in a list of `host:port` that is separated by commas. Raises ValueError."""
    return [HostPort.parse(part) for part in text.split(",")]


def _check_addresses(text: str) -> str:
    split_addresses(text)
    return text


Host = Annotated[str, AfterValidator(_check_host)]
"""Of a setting: an address to listen on."""

Addresses = Annotated[str, AfterValidator(_check_addresses)]
"""Of a setting: addresses to connect to, for `split_addresses`."""


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_can_listen(host: str, port: int) -> None:
    """Raises CannotListen, or AddressInUse, where nothing can listen on `host` and `port` now."""
    if port > MAX_PORT:  # the resolver takes it modulo 65536
        raise CannotListen(f"cannot listen on {join_host_port(host, port)}: the highest port is {MAX_PORT}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = infos[0]
        with socket.socket(family, kind, proto) as probe:
            # As servers set it: a port in TIME_WAIT is free, one with a listener is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> CannotListen:
    """The error for a failed bind, or for a host whose name cannot be resolved."""
    where = join_host_port(host, port)
    if isinstance(error, UnicodeError):
        return CannotListen(f"cannot listen on {where}: {host} is not a host")
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{where} is already in use by another process")
    why = error.strerror or os.strerror(error.errno or 0)
    return CannotListen(f"cannot listen on {where}: {why.lower()}")


def check_unix_socket(path: Path) -> None:
    """Raises CannotListen, or AddressInUse, where nothing can listen on a Unix socket at `path` now.

    A socket there on which nobody listens, as after a crash, can be replaced.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise CannotListen(f"cannot listen at {path}: the path has more than {_MAX_PATH_BYTES} bytes")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "no file can be made there" if path.parent.is_dir() else "there is no such directory"
        raise CannotListen(f"cannot listen at {path}: {why}")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CannotListen(f"cannot listen at {path}: there is something else than a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise CannotListen(f"cannot listen at {path}: {(error.strerror or str(error)).lower()}") from error
    raise AddressInUse(f"{path} is already in use by another process")
