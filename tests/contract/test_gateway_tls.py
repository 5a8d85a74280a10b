"""TLS on the ports of clients, with clients that check the certificate: OpenAI's, httpx, and Quire's own."""

import json
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from certificates import Authority
from gateway_svc.gateway import Gateway
from gateway_svc.settings import BadSetting, GatewaySettings
from quire_client import AsyncClient, QuireError
from svc_common.supervisor.probes import answers_http
from tls_gateway import NAMES, ReplaceableFiles, gateway_with_tls, trusting


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return Authority(tmp_path_factory.mktemp("ca")), Authority(tmp_path_factory.mktemp("next-ca"))


@pytest.fixture
def files(authorities: tuple[Authority, Authority], tmp_path: Path) -> ReplaceableFiles:
    files = ReplaceableFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    files.replace_by(authorities[0].issue("gateway", NAMES))
    return files


async def until_ready(gateway: Gateway, authority: Authority) -> None:
    async with httpx.AsyncClient(verify=trusting(authority), trust_env=False, timeout=60) as http:
        while (await http.get(f"https://127.0.0.1:{gateway.http_port}/health")).status_code != 200:
            pass


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_official_client_checks_the_certificate_and_streams(
    host: str, model_directory: Path, files: ReplaceableFiles, authorities: tuple[Authority, Authority]
) -> None:
    async with gateway_with_tls(model_directory, files) as gateway:
        await until_ready(gateway, authorities[0])
        async with openai.DefaultAsyncHttpxClient(verify=trusting(authorities[0]), trust_env=False) as http:
            url = f"https://{host}:{gateway.http_port}/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key="-", http_client=http, max_retries=0)
            stream = await client.completions.create(model="tiny", prompt="a", stream=True)
            assert "".join([part.choices[0].text async for part in stream]) == "hello"
        async with httpx.AsyncClient(verify=trusting(authorities[1]), trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"https://{host}:{gateway.http_port}/live")
        async with httpx.AsyncClient(trust_env=False) as plain:
            assert (await plain.get(f"http://{host}:{gateway.http_port}/live")).status_code == 400
        assert await answers_http(f"{host}:{gateway.http_port}", "/live", has_tls=True)()  # as `make run` probes it


async def test_a_websocket_has_tls(
    model_directory: Path, files: ReplaceableFiles, authorities: tuple[Authority, Authority]
) -> None:
    async with gateway_with_tls(model_directory, files) as gateway:
        await until_ready(gateway, authorities[0])
        url = f"wss://localhost:{gateway.http_port}/v1/completions"
        async with connect(url, ssl=trusting(authorities[0]), proxy=None) as connection:
            await connection.send('{"prompt": "a"}')
            assert json.loads(await connection.recv())["choices"][0]["text"] == "hello"


async def test_grpc_clients_check_the_certificate(
    model_directory: Path,
    files: ReplaceableFiles,
    authorities: tuple[Authority, Authority],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway_with_tls(model_directory, files) as gateway:
        await until_ready(gateway, authorities[0])
        address = f"127.0.0.1:{gateway.grpc_port}"
        credentials = grpc.ssl_channel_credentials(authorities[0].certificate.read_bytes())
        async with AsyncClient(address, credentials=credentials) as client:
            assert (await client.generate("a")).text == "hello"
        monkeypatch.setenv("QUIRE_CA_FILE", str(authorities[0].certificate))
        async with AsyncClient(address) as client:
            assert (await client.generate("a")).text == "hello"
        monkeypatch.setenv("QUIRE_CA_FILE", str(authorities[1].certificate))
        async with AsyncClient(address) as stranger:
            with pytest.raises(QuireError) as raised:
                await stranger.models()
            assert raised.value.reason == "TLS_FAILED"
        monkeypatch.setenv("QUIRE_CA_FILE", "/no/such/file")
        with pytest.raises(QuireError, match="QUIRE_CA_FILE: /no/such/file: no such file"):
            AsyncClient(address)


async def test_changed_files_are_used_for_new_connections_of_both_ports(
    model_directory: Path, files: ReplaceableFiles, authorities: tuple[Authority, Authority]
) -> None:
    first, second = authorities
    async with gateway_with_tls(model_directory, files) as gateway:
        await until_ready(gateway, first)
        url = f"https://127.0.0.1:{gateway.http_port}/live"
        async with httpx.AsyncClient(verify=trusting(first), trust_env=False, timeout=60) as connected:
            assert (await connected.get(url)).status_code == 200
            files.replace_by(second.issue("gateway", NAMES))
            assert (await connected.get(url)).status_code == 200  # a connection lasts
        await until_ready(gateway, second)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await until_ready(gateway, first)
        credentials = grpc.ssl_channel_credentials(second.certificate.read_bytes())
        async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}", credentials=credentials) as client:
            assert (await client.generate("a")).text == "hello"
        # Files that cannot be used are not: the earlier ones stay.
        files.key.write_text("nothing")
        await until_ready(gateway, second)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tls_key_file": None}, "QUIRE_TLS_KEY_FILE: not set"),
        ({"tls_cert_file": None}, "QUIRE_TLS_CERT_FILE: not set"),
        ({"tls_cert_file": "/no/such/file"}, "QUIRE_TLS_CERT_FILE: /no/such/file: no such file"),
        ({"tls_key_file": "/dev/null"}, "QUIRE_TLS_KEY_FILE, /dev/null"),
    ],
    ids=["no key", "no certificate", "no file", "empty"],
)
def test_files_that_cannot_be_used_are_named(
    changed: dict[str, str | None], message: str, files: ReplaceableFiles
) -> None:
    values = {"tls_cert_file": files.certificate, "tls_key_file": files.key} | changed
    with pytest.raises(BadSetting, match=message):
        GatewaySettings.model_validate(values).tls_files()
