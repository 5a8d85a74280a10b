"""HTTP clients of commands: which URLs they call, and which servers they trust."""

import ssl
from base64 import b64decode
from pathlib import Path

import pytest
from aiohttp import ClientConnectorError, web

from certificates import Authority
from quire_client import QuireError
from quire_client.http_client import base_url, error_message, http_client, is_http_url


@pytest.mark.parametrize(
    ("url", "is_callable"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://example.com/prefix/v1", True),
        ("127.0.0.1:8000", False),
        ("http://[::1", False),
        ("http://a:port", False),
        ("http://a:0", False),
        ("ftp://a", False),
    ],
)
def test_urls_of_http_can_be_called(url: str, is_callable: bool) -> None:
    assert is_http_url(url) is is_callable


@pytest.mark.parametrize("url", ["http://a/b", "http://a/b/", "http://a/b/v1", "http://a/b/v1/"])
def test_a_url_may_end_in_v1(url: str) -> None:
    assert base_url(url) == "http://a/b"


def test_an_error_has_the_servers_message_or_its_status() -> None:
    assert error_message(400, b'{"error": {"message": "no"}}') == "no"
    assert error_message(502, b"<html>") == "HTTP status 502"


async def test_a_key_that_no_header_holds_is_refused() -> None:
    with pytest.raises(QuireError, match="characters that cannot be sent"):
        http_client("http://127.0.0.1:1", "a\nb", None)


async def test_user_and_password_of_a_url_are_sent_and_not_shown() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("authorization", ""))

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    place = f"127.0.0.1:{runner.addresses[0][1]}"
    url = f"http://us%C3%A9r:s%40same@{place}/v1/"
    try:
        assert base_url(url) == f"http://{place}"
        async with http_client(url, None, 60) as http, http.get(base_url(url)) as response:
            kind, _, login = (await response.text()).partition(" ")
        assert (kind, b64decode(login).decode()) == ("Basic", "usér:s@same")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("user", "key", "why"), [("user:sesame", "key", "an API key"), ("a%3Ab:sesame", None, "must have no colon")]
)
async def test_a_login_that_cannot_be_sent_is_refused(user: str, key: str | None, why: str) -> None:
    with pytest.raises(QuireError, match=why) as refused:
        http_client(f"http://{user}@127.0.0.1:1", key, None)
    assert "sesame" not in str(refused.value)


async def test_a_server_with_tls_has_a_certificate_of_the_ca_in_the_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate = authority.issue("server", ["IP:127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with http_client(url, None, 60, str(authority.certificate)) as http, http.get(url) as response:
            assert response.status == 404
        async with http_client(url, None, 60, str(Authority(tmp_path / "other").certificate)) as http:
            with pytest.raises(ClientConnectorError):
                await http.get(url)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("content", "why"), [(None, "no such file"), ("no certificate", "no certificate")])
async def test_the_error_of_a_ca_file_that_cannot_be_used_names_it(
    content: str | None, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(QuireError, match=f"QUIRE_CA_FILE: {path}: .*{why}"):
        http_client("https://127.0.0.1:1", None, None, str(path))
