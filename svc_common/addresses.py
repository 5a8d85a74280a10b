"""Addresses to listen on, checked before they are bound, so that errors name the address."""

import errno
import os
import socket
import stat
from pathlib import Path

_MAX_PATH_BYTES = 107  # of a Unix socket on Linux
_PROBE_SECONDS = 2.0


class CannotListen(Exception):  # noqa: N818
    """No process can listen on an address. The text names host and port, or the path."""


class AddressInUse(CannotListen):
    """An address on which another process listens."""


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_can_listen(host: str, port: int) -> None:
    """Raises CannotListen, or AddressInUse, where nothing can listen on `host` and `port` now."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = infos[0]
        with socket.socket(family, kind, proto) as probe:
            # As servers set it: a port in TIME_WAIT is free, one with a listener is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    """The error for a failed bind."""
    where = join_host_port(host, port)
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
