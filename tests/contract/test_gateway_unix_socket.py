"""The HTTP API on a Unix socket, which takes the place of its port."""

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import unix_connect

from certificates import Authority
from gateway_harness import Harness, encoded, running_gateway
from gateway_svc.settings import GatewaySettings
from scripted_scheduler import answer_with
from sse import DONE, events_of
from svc_common.addresses import AddressInUse, CannotListen
from svc_common.settings import InvalidSettings, parse_settings
from svc_common.supervisor.probes import answers_http
from tiny_model import EOS
from tls_gateway import ReplaceableFiles, gateway_with_tls, trusting

HELLO = encoded("hello world")
BODY = {"prompt": "a"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quire.sock"


@pytest.fixture
async def quire(model_directory: Path, path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(model_directory, uds=path) as quire:
        quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
        yield quire


def client_of(path: Path, base_url: str = "http://any.name") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url=base_url, timeout=60)


async def test_calls_and_streams_are_answered(quire: Harness, path: Path) -> None:
    async with client_of(path) as http:
        whole = (await http.post("/v1/completions", json=BODY)).json()
        assert whole["choices"][0]["text"] == "hello world"
        *_, last, done = events_of((await http.post("/v1/completions", json=BODY | {"stream": True})).text)
        assert (last["choices"][0]["finish_reason"], done) == ("stop", DONE)
        assert "quire_gateway" in (await http.get("/metrics")).text
    assert await answers_http(f"unix:{path}", "/health")()  # as `make run` probes it
    assert not await answers_http(f"unix:{path}.other", "/health")()
    assert quire.gateway.http_port == 0


async def test_websockets_are_served(quire: Harness, path: Path) -> None:
    async with unix_connect(str(path), "ws://localhost/v1/completions") as connection:
        await connection.send(json.dumps(BODY))
        assert json.loads(await connection.recv())["choices"][0]["text"] == "hello world"


async def test_a_host_name_is_checked_if_the_operator_names_some(model_directory: Path, path: Path) -> None:
    async with running_gateway(model_directory, uds=path, allowed_hosts="api.example"), client_of(path) as http:
        assert (await http.get("/health")).status_code == 421
        assert (await http.get("/health", headers={"host": "api.example"})).status_code == 200


async def test_tls_is_served(model_directory: Path, path: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("gateway", ["DNS:localhost"])
    async with gateway_with_tls(model_directory, ReplaceableFiles(own.certificate, own.key), uds=path):
        trusted = trusting(authority)
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=trusted)
        async with httpx.AsyncClient(transport=transport, base_url="https://localhost") as http:
            assert (await http.get("/live")).status_code == 200
        assert await answers_http(f"unix:{path}", "/live", has_tls=True)()


async def test_only_its_user_may_connect_by_a_usual_umask(quire: Harness, path: Path) -> None:
    assert path.is_socket()
    assert path.stat().st_mode & 0o022 == 0


async def test_the_file_is_there_while_the_gateway_runs(model_directory: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
        crashed.listen()
    async with running_gateway(model_directory, uds=path), client_of(path) as http:
        assert (await http.get("/live")).status_code == 200
        with pytest.raises(AddressInUse, match=f"{path} is already in use"):
            async with running_gateway(model_directory, uds=path):
                pass
        assert (await http.get("/live")).status_code == 200
    assert not path.exists()


async def test_the_file_of_another_process_stays(model_directory: Path, path: Path) -> None:
    async with running_gateway(model_directory, uds=path):
        path.unlink()
        path.touch()
    assert path.exists()
    with pytest.raises(CannotListen, match="something else than a socket"):
        async with running_gateway(model_directory, uds=path):
            pass


def test_clients_of_a_socket_have_no_addresses_to_bound(path: Path) -> None:
    with pytest.raises(InvalidSettings, match="QUIRE_MAX_HTTP_CONNECTIONS_PER_ADDRESS"):
        parse_settings(GatewaySettings, [f"--uds={path}", "--max-http-connections-per-address=2"])
