"""Checks of ports: whether a service can listen there, and otherwise which process listens already."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from svc_common.addresses import (
    MAX_PORT,
    AddressInUse,
    CannotListen,
    check_can_listen,
    check_unix_socket,
    join_host_port,
)
from svc_common.doctor.findings import Finding, ok, wrong

_LISTENING = "0A"
_WILDCARDS = {"0.0.0.0", "::"}

ListenSetting = tuple[str, int, str]
"""Host, port, and the variable that the port came from."""


def check_ports(listeners: Sequence[ListenSetting]) -> Iterator[Finding]:
    """A finding for each port that cannot be used; one finding if all can. A port of 0 takes a free one."""
    free: list[str] = []
    taken: list[ListenSetting] = []
    for host, port, variable in listeners:
        if port == 0:
            continue
        where = join_host_port(host, port)
        conflict = next((other for other in taken if _conflict(other, (host, port, variable))), None)
        taken.append((host, port, variable))
        if conflict is not None:
            problem = f"{conflict[2]} and {variable} both come to port {port}"
            yield wrong(where, problem, "set one of them to another port")
            continue
        try:
            check_can_listen(host, port)
        except AddressInUse as error:
            holder = holder_of(port)
            found = f"{where} is held by {holder}" if holder else str(error)
            step = f"stop that process, or set {variable} to another port"
            yield wrong(found, f"{variable}: the port is in use", step)
        except CannotListen as error:
            step = f"set QUIRE_HOST to an address of this machine, or {variable} to a port from 1024 to {MAX_PORT}"
            yield wrong(where, f"{error} ({variable}, QUIRE_HOST)", step)
        else:
            free.append(where)
    if free:
        yield ok(f"free: {', '.join(free)}")
    elif not taken:
        yield ok("all ports are chosen at start")


def check_socket_path(path: Path) -> Iterator[Finding]:
    """A finding for the path of a Unix socket for HTTP."""
    try:
        check_unix_socket(path)
    except AddressInUse as error:
        yield wrong(str(error), "QUIRE_UDS: another process listens there", "stop it, or set another path")
    except CannotListen as error:
        yield wrong(str(path), f"QUIRE_UDS: {error}", "set the path of a socket in a directory of the gateway's own")
    else:
        yield ok(f"free: {path}")


def _conflict(one: ListenSetting, other: ListenSetting) -> bool:
    """Whether two settings have the same port at the same address. An address that stands for all equals each."""
    if one[1] != other[1] or one[2] == other[2]:
        return False
    hosts = {_address(one), _address(other)}
    return len(hosts) == 1 or bool(hosts & _WILDCARDS)


def _address(setting: ListenSetting) -> str:
    """The address at which a server listens; the host itself where it has none."""
    host, port, _ = setting
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError):
        return host


def holder_of(port: int, proc: Path = Path("/proc")) -> str | None:
    """Name and id of the process that listens on a port; None where another user's processes cannot be seen.

    Arguments are left out, since they may have secrets.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    for directory in proc.iterdir() if sockets else ():
        if directory.name.isdecimal() and sockets & set(_open_files(directory / "fd")):
            try:
                return f"{(directory / 'comm').read_text().strip()} (process {directory.name})"
            except OSError:
                continue
    return None


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _open_files(directory: Path) -> Iterable[str]:
    try:
        links = list(directory.iterdir())
    except OSError:  # another user's process, or one that has ended
        return []
    targets = []
    for link in links:
        try:
            targets.append(str(link.readlink()))
        except OSError:
            continue
    return targets
