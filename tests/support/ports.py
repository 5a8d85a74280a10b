"""Ports for servers that restart on the same port."""

import os
import random
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST = 10_000


def _shuffled_ports() -> Iterator[int]:
    """Ports outside the range from which the system assigns ports; pytest's processes have different ones."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(islice(range(_FIRST, first_of_system), index, None, num_processes))
    while True:
        random.SystemRandom().shuffle(ports)
        yield from ports


_PORTS = _shuffled_ports()


def lasting_port() -> int:
    """A free port; the next call returns another one, although no server uses the first yet."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise AssertionError("the ports never end")
