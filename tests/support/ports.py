"""Ports for servers that restart on the same port."""

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST = 10_000


def lasting_port() -> int:
    """A free port outside the range from which the system assigns ports."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(_FIRST, first_of_system)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
