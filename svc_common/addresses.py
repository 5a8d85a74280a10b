"""Addresses to listen on, checked before they are bound, so that errors name the address."""

import errno
import os
import socket


class CannotListen(Exception):  # noqa: N818
    """No process can listen on an address. The text names host and port."""


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
