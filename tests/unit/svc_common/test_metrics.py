"""Metrics over HTTP."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import Counter

from svc_common.addresses import AddressInUse
from svc_common.metrics import MAX_CONNECTIONS, MetricsServer, serve_metrics
from svc_common.server import HealthReporter, create_server

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


@pytest.fixture
async def server() -> AsyncIterator[tuple[HealthReporter, MetricsServer]]:
    health = HealthReporter(create_server(max_message_bytes=1024), [])
    server = serve_metrics("127.0.0.1", 0, health)
    yield health, server
    server.close()


def test_slow_callers_keep_no_scrape_away() -> None:
    """The oldest of too many connections is closed."""
    server = serve_metrics("127.0.0.1", 0)
    callers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)]
    try:
        for caller in callers:
            caller.sendall(b"GET /metrics HTTP/1.1\r\n")
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as response:
            assert response.status == 200
        callers[0].settimeout(60)
        assert callers[0].recv(1) == b""
    finally:
        for caller in callers:
            caller.close()
        server.close()


def probe(server: MetricsServer, path: str) -> int:
    """The status of a probe as Kubernetes sends it."""
    try:
        with urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


async def test_health_is_that_of_the_grpc_port(server: tuple[HealthReporter, MetricsServer]) -> None:
    health, metrics = server

    async def probes() -> list[int]:
        return [await asyncio.to_thread(probe, metrics, path) for path in ("/live", "/health", "/metrics")]

    assert await probes() == [200, 503, 200]
    await health.set_serving(True)
    assert await probes() == [200, 200, 200]
    await health.set_serving(False)
    assert await probes() == [200, 503, 200]


async def test_health_has_the_details_of_the_process() -> None:
    health = HealthReporter(create_server(max_message_bytes=1024), [])
    metrics = serve_metrics("127.0.0.1", 0, health, details=lambda: {"memory": {"pressure": "none"}})
    await health.set_serving(True)

    def read(path: str) -> tuple[str | None, str]:
        with urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=60) as response:
            return response.headers["Content-Type"], response.read().decode()

    kind, text = await asyncio.to_thread(read, "/health")
    assert (kind, json.loads(text)) == ("application/json", {"status": "SERVING", "memory": {"pressure": "none"}})
    assert await asyncio.to_thread(read, "/live") == ("text/plain", "SERVING\n")
    await health.set_serving(False)
    assert await asyncio.to_thread(probe, metrics, "/health") == 503
    metrics.close()


async def test_a_process_whose_event_loop_hangs_is_not_live(server: tuple[HealthReporter, MetricsServer]) -> None:
    _, metrics = server
    assert probe(metrics, "/live") == 503  # this call itself holds the event loop


def test_the_error_of_a_port_in_use_names_it() -> None:
    server = serve_metrics("127.0.0.1", 0)
    try:
        with pytest.raises(AddressInUse, match=str(server.port)):
            serve_metrics("127.0.0.1", server.port)
    finally:
        server.close()
