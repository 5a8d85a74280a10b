"""The addresses, credentials and metadata of a client's calls."""

import asyncio
import math
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates import Authority, Certificate
from quire_client import AsyncClient, Client, QuireError
from quire_client.admin import AdminClient
from quire_client.cli.output import ADMIN_UNAUTHENTICATED, admin_error
from quire_client.connection import Connection, channel_options, is_loopback
from svc_common.service_roles import ServiceRole


def resolve(address: str | None = None, api_key: str | None = None) -> Connection:
    return Connection.resolve(address, None, None, api_key)


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ADDRESS", "there:1")
    monkeypatch.setenv("QUIRE_API_KEY", "theirs")

    assert resolve("here:2", "mine").addresses == ("here:2",)
    assert resolve("here:2", "mine").api_key == "mine"
    assert resolve().addresses == ("there:1",)
    assert resolve().api_key == "theirs"


def test_commas_separate_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ADDRESS", "a:1, dns:///b:2,")

    assert resolve().addresses == ("a:1", "dns:///b:2")
    assert resolve().name == "a:1, dns:///b:2"


def test_without_anything_it_is_this_machine_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_ADDRESS", raising=False)
    monkeypatch.setenv("QUIRE_API_KEY", "")

    assert resolve().addresses == ("127.0.0.1:50051",)
    assert resolve().metadata(None) == ()


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(resolve("here:2", "secret"))


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_holds_is_refused_without_telling_it(key: str) -> None:
    with pytest.raises(QuireError, match="API key") as caught:
        resolve("here:2", key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("ca", "has_tls", "reason", "why"),
    [
        ("theirs", True, "NO_GRPC", "in HTTP/1.1"),
        ("other", True, "TLS_FAILED", "is not of a CA that is trusted"),
        ("theirs", False, "TLS_FAILED", "has no TLS"),
    ],
)
async def test_why_tls_with_a_server_fails_is_named(
    ca: str, has_tls: bool, reason: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorities = {name: Authority(tmp_path / name) for name in ("theirs", "other")}
    certificate = authorities["theirs"].issue("server", ["IP:127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0, ssl=context if has_tls else None)
    monkeypatch.setenv("QUIRE_CA_FILE", str(authorities[ca].certificate))
    async with server, AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(QuireError, match=why) as caught:
            await client.models()
    assert caught.value.reason == reason


@asynccontextmanager
async def tls_server(certificate: Certificate, *, requires_certificate: bool = False) -> AsyncIterator[str]:
    """The address of a gRPC server without services."""
    pair = (certificate.key.read_bytes(), certificate.certificate.read_bytes())
    ca = certificate.ca.read_bytes() if requires_certificate else None
    server = grpc.aio.server()
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], ca, require_client_auth=requires_certificate)
    )
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(
    ("names", "days", "trusts_ca", "why"),
    [
        (["IP:127.0.0.1"], 2, False, "may require TLS"),
        (["IP:127.0.0.1"], 0, True, "its certificate has expired"),
        (["DNS:another.example"], 2, True, "its certificate is for another host"),
    ],
    ids=["no TLS", "expired", "another host"],
)
async def test_why_no_connection_to_a_server_with_tls_is_made_is_named(
    names: list[str], days: int, trusts_ca: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Authority(tmp_path).issue("server", names, days)
    if trusts_ca:
        monkeypatch.setenv("QUIRE_CA_FILE", str(certificate.ca))
    async with tls_server(certificate) as address, AsyncClient(address) as client:
        with pytest.raises(QuireError, match=why) as caught:
            await client.models()
    assert caught.value.reason == "TLS_FAILED"


async def test_a_certificate_that_a_scheduler_rejects_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    certificates = [
        authority.issue_for(role, days) for role, days in ((ServiceRole.SCHEDULER, 2), (ServiceRole.ADMIN, 0))
    ]
    for name, value in certificates[1].variables.items():
        monkeypatch.setenv(name, value)
    async with tls_server(certificates[0], requires_certificate=True) as address:
        with (
            AdminClient(address) as client,
            pytest.raises(QuireError, match="another certificate of its client") as caught,
        ):
            await asyncio.to_thread(client.requests)
    assert admin_error(caught.value, address).reason == ADMIN_UNAUTHENTICATED


def test_a_file_of_cas_without_a_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ca.pem"
    monkeypatch.setenv("QUIRE_CA_FILE", str(path))
    for text in ("", "no certificate"):
        path.write_text(text)
        with pytest.raises(QuireError, match=f"QUIRE_CA_FILE: {path} has no certificate in PEM format"):
            resolve()
    path.write_text(Authority(tmp_path / "ca").certificate.read_text(), encoding="utf-8-sig")
    assert resolve().credentials is not None


@pytest.mark.parametrize("address", ["http://here:8000", "a:1,HTTPS://here"])
def test_a_url_is_no_address(address: str) -> None:
    with pytest.raises(QuireError, match=r"is a URL: an address is host:port"):
        resolve(address)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("127.example.org:50051", False),
        ("dns:///quire:50051", False),
        ("10.0.0.1:50051", False),
    ],
)
def test_only_this_machine_is_called_past_a_proxy(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is loopback


def test_an_infinite_timeout_is_none() -> None:
    assert Connection.resolve(None, None, math.inf, None).timeout is None
    limited = Connection.resolve(None, None, 5, None)
    assert [limited.deadline(timeout) for timeout in (None, 3, math.inf)] == [5, 3, None]


@pytest.mark.parametrize("timeout", [math.nan, -math.inf, 1e300])
def test_a_timeout_that_cannot_be_waited_for_is_refused(timeout: float) -> None:
    for client in (Client, AdminClient):
        with pytest.raises(ValueError, match=f"timeout is {re.escape(str(timeout))}: it must be a number of seconds"):
            client(timeout=timeout)
    with pytest.raises(ValueError, match="timeout is"):
        resolve().deadline(timeout)


def test_a_timeout_that_is_no_number_is_a_type_error() -> None:
    timeout: Any = "5"
    with pytest.raises(TypeError, match="timeout must be a number of seconds, not str"):
        Client(timeout=timeout)
