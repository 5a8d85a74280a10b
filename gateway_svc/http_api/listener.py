"""The listening socket of the HTTP API: a port, or a Unix socket, which is a file."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from svc_common.addresses import CannotListen, cannot_listen, check_can_listen, check_unix_socket

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class HttpListener:
    """A socket that listens. `path` is that of a Unix socket, and `file` its device and inode; None: it has a port."""

    socket: socket.socket
    path: Path | None = None
    file: tuple[int, int] | None = None

    @classmethod
    def on_port(cls, host: str, port: int) -> Self:
        """Listens on a port, or on a free one where `port` is 0. Raises CannotListen."""
        check_can_listen(host, port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only if the protocol is given.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise cannot_listen(host, port, error) from error
        return cls(listener)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Listens at a path, in place of a socket there on which nobody listens. Raises CannotListen."""
        check_unix_socket(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
            file = path.stat()
        except OSError as error:
            listener.close()
            raise CannotListen(f"cannot listen at {path}: {(error.strerror or str(error)).lower()}") from error
        return cls(listener, path, (file.st_dev, file.st_ino))

    @property
    def port(self) -> int:
        """Its port; 0: it has a path."""
        return int(self.socket.getsockname()[1]) if self.path is None else 0

    def remove_file(self) -> None:
        """Removes the file of a Unix socket, unless another process has replaced it."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            file = self.path.stat()
            if (file.st_dev, file.st_ino) == self.file:
                self.path.unlink()
