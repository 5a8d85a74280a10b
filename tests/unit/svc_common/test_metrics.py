"""Metrics over HTTP."""

import socket
from urllib.request import urlopen

import pytest
from prometheus_client import Counter

from svc_common.addresses import AddressInUse
from svc_common.metrics import serve_metrics

served = Counter("quire_test_served", "Counts for this test")


def test_metrics_are_served_until_closed() -> None:
    server = serve_metrics("127.0.0.1", 0)
    served.inc(3)
    try:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
            assert "quire_test_served_total 3.0" in response.read().decode()
    finally:
        server.close()
    with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
        caller.connect(("127.0.0.1", server.port))


def test_the_error_of_a_port_in_use_names_it() -> None:
    server = serve_metrics("127.0.0.1", 0)
    try:
        with pytest.raises(AddressInUse, match=str(server.port)):
            serve_metrics("127.0.0.1", server.port)
    finally:
        server.close()
