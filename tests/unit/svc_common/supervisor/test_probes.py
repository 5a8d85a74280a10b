"""Whether a service answers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from svc_common.server import LIVENESS, HealthReporter, bind, create_server
from svc_common.supervisor.addresses import free_port
from svc_common.supervisor.probes import answers_grpc, answers_http


async def test_a_grpc_service_answers_while_it_is_serving() -> None:
    server = create_server(max_message_bytes=1024)
    reporter = HealthReporter(server, [])
    probe = answers_grpc(f"127.0.0.1:{bind(server, '127.0.0.1', 0)}")
    await server.start()
    assert not await probe()
    await reporter.set_serving(True)
    assert await probe()
    await server.stop(None)
    assert not await probe()


async def test_a_grpc_service_that_does_not_serve_is_live() -> None:
    server = create_server(max_message_bytes=1024)
    HealthReporter(server, [])
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    assert await answers_grpc(address, LIVENESS)()
    assert not await answers_grpc(address)()
    assert not await answers_grpc(address, "no.such.Service")()
    await server.stop(None)


class Health(BaseHTTPRequestHandler):
    status = 503

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def http_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_an_http_service_answers_with_200(http_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = answers_http(http_server, "/health")
    assert not await probe()
    monkeypatch.setattr(Health, "status", 200)
    assert await probe()


async def test_nothing_answers_on_a_free_port() -> None:
    assert not await answers_http(f"127.0.0.1:{free_port()}", "/health")()
    assert not await answers_grpc(f"127.0.0.1:{free_port()}")()
