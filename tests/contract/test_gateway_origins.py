"""Which names a client may use for the HTTP port, and which web pages may use it."""

from pathlib import Path

import pytest

from gateway_harness import Harness, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def quire(shared: Harness) -> Harness:
    return shared


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost.:8000",
        "a.localhost",
        "host.docker.internal",
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
    ],
)
async def test_a_gateway_on_loopback_takes_names_of_loopback_and_addresses(host: str, quire: Harness) -> None:
    assert (await quire.http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8000", "localhost.evil.com", "evillocalhost", "127.0.0.1.evil.com"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/live", "/nowhere"])
async def test_a_name_that_another_site_points_at_loopback_is_refused(host: str, path: str, quire: Harness) -> None:
    response = await quire.http.get(path, headers={"host": host})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (421, "host_not_allowed", "Host")


@pytest.mark.parametrize("host", ["a b", "a/b", "[::1", "localhost:x", ""])
async def test_a_malformed_host_is_a_bad_request(host: str, quire: Harness) -> None:
    response = await quire.http.get("/live", headers={"host": host})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Host")


async def test_hosts_are_a_setting(model_directory: Path) -> None:
    allowed = "api.example.com, *.internal"
    async with running_gateway(model_directory, allowed_hosts=allowed) as quire:
        for host, status in [
            ("api.example.com", 200),
            ("API.example.com:443", 200),
            ("quire.internal", 200),
            ("127.0.0.1", 200),
            ("www.example.com", 421),
            ("internal", 421),
            ("localhost", 421),
        ]:
            assert (await quire.http.get("/live", headers={"host": host})).status_code == status, host


async def test_a_gateway_beyond_loopback_takes_any_name(model_directory: Path) -> None:
    async with running_gateway(model_directory, host="0.0.0.0") as quire:
        assert (await quire.http.get("/live", headers={"host": "quire.prod.svc"})).status_code == 200


PAGE = {"origin": "https://chat.example.com"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_no_web_page_may_use_the_api_by_default(quire: Harness) -> None:
    preflight = await quire.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 405
    response = await quire.http.get("/v1/models", headers=PAGE)
    assert not any(name.startswith("access-control") for name in (*preflight.headers, *response.headers))


async def test_pages_of_chosen_origins_may_use_the_api(model_directory: Path) -> None:
    async with running_gateway(
        model_directory, cors_origins="https://chat.example.com, http://localhost:3000"
    ) as quire:
        preflight = await quire.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE["origin"]
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        response = await quire.http.get("/v1/models", headers=PAGE)
        assert response.headers["access-control-allow-origin"] == PAGE["origin"]
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        other = {"origin": "https://evil.com"}
        assert (await quire.http.options("/v1/models", headers=PREFLIGHT | other)).status_code == 400
        assert "access-control-allow-origin" not in (await quire.http.get("/v1/models", headers=other)).headers


async def test_pages_of_all_origins(model_directory: Path) -> None:
    async with running_gateway(model_directory, cors_origins="*") as quire:
        response = await quire.http.get("/v1/models", headers=PAGE)
        assert response.headers["access-control-allow-origin"] == "*"
