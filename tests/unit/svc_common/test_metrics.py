"""Metrics over HTTP."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from svc_common.addresses import AddressInUse
from svc_common.metrics import MAX_CONNECTIONS, MAX_HEADER_BYTES, MetricsServer, serve_metrics
from svc_common.server import HealthReporter, create_server

served = Counter("test_served", "Counts for this test")


def test_metrics_are_served_until_closed() -> None:
    server = serve_metrics("127.0.0.1", 0)
    served.inc(3)
    try:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
            assert "test_served_total 3.0" in response.read().decode()
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


class Idle:
    """Connections to a server that have sent nothing, or a part of a request."""

    def __init__(self, server: MetricsServer, count: int, sent: bytes = b"") -> None:
        self.sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(count)]
        for one in self.sockets:
            one.sendall(sent)

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def test_connections_beyond_the_bound_close_the_oldest_and_probes_are_answered() -> None:
    server = serve_metrics("127.0.0.1", 0)
    idle = Idle(server, MAX_CONNECTIONS)
    newer = Idle(server, 3)
    try:
        assert probe(server, "/metrics") == 200
        assert [one.recv(1) for one in idle.sockets[:4]] == [b""] * 4  # three of the others, and one of the probe
        assert threading.active_count() < MAX_CONNECTIONS + 10
        assert probe(server, "/metrics") == 200
        newer.sockets[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")  # it is open
        assert newer.sockets[-1].recv(12) == b"HTTP/1.0 200"
    finally:
        idle.close()
        newer.close()
        server.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.0\r\nX-Header: "], ids=["nothing", "a part of a header"])
def test_a_connection_has_a_time_limit(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svc_common.metrics.CONNECTION_SECONDS", 0.2)
    server = serve_metrics("127.0.0.1", 0)
    idle = Idle(server, 2, sent)
    try:
        assert [len(one.recv(12)) for one in idle.sockets] in ([0, 0], [12, 12])  # closed, or what came is answered
        assert [drained(one) for one in idle.sockets] == [True, True]
    finally:
        idle.close()
        server.close()


def test_a_client_that_does_not_read_has_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("svc_common.metrics.CONNECTION_SECONDS", 2.0)
    registry = CollectorRegistry()
    Gauge("quire_test_large", "x" * 2**24, registry=registry)  # more than the buffers of a connection
    server = serve_metrics("127.0.0.1", 0, registry=registry)
    before = threading.active_count()
    idle = Idle(server, 1, b"GET /metrics HTTP/1.0\r\n\r\n")
    try:
        assert idle.sockets[0].recv(12) == b"HTTP/1.0 200"
        assert threading.active_count() == before + 1
        wait_for(lambda: threading.active_count() == before)
    finally:
        idle.close()
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_headers_end_where_they_are_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    server = serve_metrics("127.0.0.1", 0)
    line = b"X-Header: " + b"x" * (MAX_HEADER_BYTES // 4) + b"\r\n"
    idle = Idle(server, 1, b"GET /metrics HTTP/1.0\r\n" + 5 * line)
    wrong = Idle(server, 1, b"GET\r\n\r\n")
    try:
        assert idle.sockets[0].recv(12) == b"HTTP/1.0 200"  # no empty line was sent
        assert drained(wrong.sockets[0])
        assert probe(server, "/metrics") == 200
    finally:
        idle.close()
        wrong.close()
        server.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("version", ["abc", "9" * 5000])
def test_a_malformed_accept_is_as_none(version: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Anyone may send one, so it must not fill the log."""
    server = serve_metrics("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        with urlopen(Request(url, headers={"Accept": f"text/plain;version={version}"})) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def drained(connection: socket.socket) -> bool:
    """Reads until the server has closed a connection."""
    with suppress(ConnectionError):
        while connection.recv(2**16):
            pass
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something is the case."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_error_of_a_port_in_use_names_it() -> None:
    server = serve_metrics("127.0.0.1", 0)
    try:
        with pytest.raises(AddressInUse, match=str(server.port)):
            serve_metrics("127.0.0.1", server.port)
    finally:
        server.close()
