"""Ports for servers that restart on the same port."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST = 10_000


def _shuffled_ports() -> Iterator[int]:
    """Ports below those that the system assigns, each once; pytest's processes have different ones."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(_FIRST + index, first_of_system, num_processes))
    random.SystemRandom().shuffle(ports)
    yield from ports


_PORTS = _shuffled_ports()


def lasting_port() -> int:
    """A free port outside the range from which the system assigns ports. No other call returns it."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is left")
