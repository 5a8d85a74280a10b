"""A request of a batch is sent until it has an answer, whatever happens to the server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire_client.batch.client import BatchClient, takes_post
from quire_client.batch.input import open_input
from quire_client.batch.lines import BatchError, BatchLine, read_line
from quire_client.batch.transport import HttpTransport
from quire_client.http_client import http_client
from scripted_http_api import BREAK, Reply, ScriptedApi

NAME = "name-1"


def request(url: str = "/v1/completions", **body: Any) -> BatchLine:
    fields = {"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": "x", **body}}
    return read_line(json.dumps(fields).encode(), 1)


class Retries(list[str]):
    """The reasons of retries."""


@asynccontextmanager
async def serving(
    api: ScriptedApi, *, timeout: float | None = None, server_timeout: float = 60, path: str = ""
) -> AsyncIterator[tuple[BatchClient, Retries]]:
    whys = Retries()
    async with http_client(api.url, "secret", timeout, connect_timeout=30) as http:
        transport = HttpTransport(f"{api.url}{path}", http, server_timeout)
        yield BatchClient(transport, whys.append), whys


async def check(client: BatchClient, path: str) -> None:
    with open_input(path) as batch:
        await client.check(batch)


async def test_a_server_without_tls_is_named_at_once(api: ScriptedApi) -> None:
    url = api.url.replace("http://", "https://")
    async with http_client(url, None, None, connect_timeout=30) as http:
        client = BatchClient(HttpTransport(url, http, 60), lambda _: None)
        with pytest.raises(BatchError, match="TLS fails; the server there may have no TLS: then its URL begins with"):
            await client.send(request(), NAME)


async def test_a_request_is_sent_with_its_name_and_the_key(api: ScriptedApi) -> None:
    async with serving(api, path="/v1/") as (client, whys):
        answer = await client.send(request(), NAME)

    assert (answer.status, answer.request_id, json.loads(answer.body or b"")) == (200, "r-1", {"text": "x"})
    (received,) = api.posts
    assert (received.path, received.name, received.authorization) == ("/v1/completions", NAME, "Bearer secret")
    assert received.body == {"prompt": "x"}
    assert whys == []


async def test_a_response_that_is_not_stored_is_sent_without_a_name(api: ScriptedApi) -> None:
    async with serving(api) as (client, _):
        await client.send(request("/v1/responses", store=False), NAME)
    assert api.posts[0].name is None


async def test_what_cannot_be_answered_now_is_sent_again_under_its_name(api: ScriptedApi) -> None:
    api.script = [Reply.error(429, "slow down"), Reply(502, b"<html>"), BREAK, Reply.error(503, "no worker")] * 5
    async with serving(api) as (client, whys):
        assert (await client.send(request(), NAME)).status == 200
    assert [post.name for post in api.posts] == [NAME] * 21
    broke = f"the connection to {api.url} broke"
    assert whys == ["slow down", "HTTP status 502", broke, "no worker"] * 5


async def test_a_refusal_is_the_answer(api: ScriptedApi) -> None:
    api.script = [Reply.error(400, "temperature is too high")]
    async with serving(api) as (client, _):
        answer = await client.send(request(), NAME)
    assert (answer.status, answer.is_error, len(api.posts)) == (400, True, 1)
    assert json.loads(answer.body or b"")["error"]["message"] == "temperature is too high"


async def test_an_internal_error_is_the_answer_only_if_it_stays(api: ScriptedApi) -> None:
    api.script = [Reply.error(503, "later")] * 10 + [Reply.error(500, "internal error", "internal")] * 4
    async with serving(api) as (client, _):
        assert (await client.send(request(), NAME)).status == 200
        api.script = [Reply.error(500, "internal error", "internal")] * 5
        assert (await client.send(request(), NAME)).status == 500


async def test_a_name_that_another_request_has_is_replaced(api: ScriptedApi) -> None:
    taken = Reply.error(409, "another request has this name", "idempotency_key_reused")
    api.script = [taken, taken]
    async with serving(api) as (client, _):
        assert (await client.send(request(), NAME)).status == 200
        api.script = [taken] * 5
        assert (await client.send(request(), NAME)).status == 409
    assert [post.name for post in api.posts[:3]] == [NAME, f"{NAME}_1", f"{NAME}_2"]


@pytest.mark.parametrize("body", [b"<html>oops</html>", b"\xff", b'{"score": NaN}'])
async def test_a_response_that_is_not_json_is_an_error(body: bytes, api: ScriptedApi) -> None:
    api.script = [Reply(200, body)]
    async with serving(api) as (client, _):
        answer = await client.send(request(), NAME)
    assert (answer.body, answer.problem, answer.is_error) == (None, body.decode(errors="replace"), True)


async def test_null_is_json(api: ScriptedApi) -> None:
    api.script = [Reply(200, b"null")]
    async with serving(api) as (client, _):
        answer = await client.send(request(), NAME)
    assert (answer.body, answer.problem, answer.is_error) == (b"null", None, False)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_credentials_end_the_batch(status: int, api: ScriptedApi) -> None:
    api.script = [Reply.error(status, "no such key")]
    async with serving(api) as (client, _):
        with pytest.raises(BatchError, match="no such key; give a key with --api-key or QUIRE_API_KEY"):
            await client.send(request(), NAME)


async def test_a_redirection_ends_the_batch(api: ScriptedApi) -> None:
    api.script = [Reply(301, b"", {"location": "https://other/"})]
    async with serving(api) as (client, _):
        with pytest.raises(BatchError, match="redirects to https://other/; name the server itself"):
            await client.send(request(), NAME)


async def test_a_server_that_is_restarted_answers_then(api: ScriptedApi) -> None:
    api.script = [Reply.error(503, "draining")] * 10_000
    async with serving(api) as (client, whys):
        answering = asyncio.create_task(client.send(request(), NAME))
        while not whys:
            await asyncio.sleep(0.01)
        await api.stop()
        while f"no connection to {api.url}" not in whys:
            await asyncio.sleep(0.01)
        api.script.clear()
        await api.start()
        assert (await answering).status == 200


async def test_a_server_that_stays_away_ends_the_batch_after_a_time(api: ScriptedApi) -> None:
    await api.stop()
    async with serving(api, server_timeout=0.1) as (client, whys):
        with pytest.raises(BatchError, match=r"no connection to .* for 0\.1 s; start the same command again to go on"):
            await client.send(request(), NAME)
    assert whys


async def test_connections_that_break_do_not_end_the_batch_of_a_server_that_answers(api: ScriptedApi) -> None:
    api.script = [BREAK] * 20
    async with serving(api, server_timeout=0.05) as (client, whys):
        assert (await client.send(request(), NAME)).status == 200
    assert set(whys) == {f"the connection to {api.url} broke"}


@pytest.mark.parametrize(
    ("greeting", "why"), [(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not answer in HTTP"), (b"", "within the timeout")]
)
async def test_a_port_that_is_not_http_ends_the_batch(greeting: bytes, why: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()  # until the client closes
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http_client(url, None, 0.1, connect_timeout=30) as http:
            whys = Retries()
            client = BatchClient(HttpTransport(url, http, 0.3), whys.append)
            with pytest.raises(BatchError, match=r"no HTTP response from .* for 0\.3 s; start the same command again"):
                await asyncio.wait_for(client.send(request(), NAME), 20)
    assert why in whys[0]


async def test_calls_that_take_long_do_not_end_the_batch_of_a_server_that_answers(api: ScriptedApi) -> None:
    async with serving(api, timeout=0.2, server_timeout=0.5) as (client, whys):
        api.going.clear()
        sending = asyncio.create_task(client.send(request(), NAME))
        await reached(whys, f"no answer from {api.url} within the timeout", 6)  # 1.2 s
        api.going.set()
        assert (await sending).status == 200


async def reached(whys: Retries, why: str, count: int) -> None:
    """Waits until a reason has been there so many times."""
    async with asyncio.timeout(20):
        while whys.count(why) < count:
            await asyncio.sleep(0.01)


async def test_a_connection_that_does_not_come_within_the_calls_own_timeout_is_none(api: ScriptedApi) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(2):  # the kernel answers no more than these
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        async with http_client(api.url, None, 0.1, connect_timeout=30) as http:
            whys = Retries()
            client = BatchClient(HttpTransport(f"http://127.0.0.1:{address[1]}", http, 0.3), whys.append)
            with pytest.raises(BatchError, match=r"no connection to .* for 0\.3 s"):
                await asyncio.wait_for(client.send(request(), NAME), 20)


async def test_time_in_which_the_server_answers_is_no_time_without_it(api: ScriptedApi) -> None:
    api.script = [BREAK, Reply.error(503, "later")] * 20
    async with serving(api, server_timeout=0.05) as (client, _):
        assert (await client.send(request(), NAME)).status == 200


async def test_a_call_that_takes_too_long_is_sent_again_under_its_name(api: ScriptedApi) -> None:
    api.going.clear()
    async with serving(api, timeout=0.2) as (client, whys):
        answering = asyncio.create_task(client.send(request(), NAME))
        while len(api.posts) < 3:
            await asyncio.sleep(0.01)
        api.going.set()
        assert (await answering).status == 200
    assert {post.name for post in api.posts} == {NAME}
    assert whys[0] == f"no answer from {api.url} within the timeout"


@pytest.mark.parametrize(("url", "body"), [("/v1/embeddings", {"input": "x"}), ("/v1/responses", {"store": False})])
async def test_timeouts_of_a_request_without_a_name_are_errors(
    url: str, body: dict[str, Any], api: ScriptedApi
) -> None:
    api.going.clear()
    async with serving(api, timeout=0.1) as (client, whys):
        answer = await asyncio.wait_for(client.send(request(url, **body), NAME), 20)
    assert (len(api.posts), len(whys)) == (5, 4)
    assert answer.is_error
    assert (answer.status, answer.body, answer.problem) == (
        None,
        None,
        "no answer within the timeout; 5 attempts have failed",
    )


async def test_timeouts_and_internal_errors_have_one_limit(api: ScriptedApi) -> None:
    api.script = [Reply.error(500, "internal error", "internal")] * 3
    async with serving(api, timeout=0.3) as (client, whys):
        sending = asyncio.create_task(client.send(request("/tokenize"), NAME))
        await reached(whys, "internal error", 3)
        api.going.clear()
        assert (await asyncio.wait_for(sending, 20)).status is None
    assert len(api.posts) == 5


async def test_the_check_waits_until_the_server_answers(api: ScriptedApi, make_input: Any) -> None:
    await api.stop()
    async with serving(api) as (client, whys):
        checking = asyncio.create_task(check(client, make_input(1)))
        while not whys:
            await asyncio.sleep(0.01)
        await api.start()
        await checking


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (Reply(404), "does not answer as OpenAI's does"),
        (Reply(200, b"<html>"), "does not answer as OpenAI's does"),
        (Reply(200, b"[]"), "does not answer as OpenAI's does"),
        (Reply.error(401, "no such key"), "no such key; give a key"),
    ],
)
async def test_a_server_of_another_kind_or_without_a_key_gets_no_request(
    page: Reply, problem: str, api: ScriptedApi, make_input: Any
) -> None:
    api.pages["/v1/models"] = page
    async with serving(api) as (client, _):
        with pytest.raises(BatchError, match=problem):
            await check(client, make_input(1))
    assert api.posts == []


async def test_openais_urls_need_no_document(api: ScriptedApi, make_input: Any) -> None:
    async with serving(api) as (client, _):
        for name in ("chat/completions", "completions", "embeddings", "responses"):
            await check(client, make_input(1, f"/v1/{name}"))


async def test_other_urls_are_looked_up_in_the_servers_document(
    api: ScriptedApi, make_input: Any, tmp_path: Path
) -> None:
    path = make_input(1, "/tokenize/")
    async with serving(api) as (client, _):
        with pytest.raises(BatchError, match=r"line 1: url: /tokenize/ is no path of .*/openapi.json does not say so"):
            await check(client, path)
        api.pages["/openapi.json"] = Reply(body=json.dumps({"paths": {"/tokenize": {"post": {}}}}).encode())
        await check(client, path)
        api.pages["/openapi.json"] = Reply(body=json.dumps({"paths": {"/tokenize": {"get": {}}}}).encode())
        with pytest.raises(BatchError, match=r"line 1: url: /tokenize/ is no path of .* that takes POST$"):
            await check(client, path)


@pytest.mark.parametrize(
    ("url", "takes"),
    [
        ("/a.b", True),
        ("/a.b/", True),
        ("/aXb", False),
        ("/a/1/c", True),
        ("/a//c", False),
        ("/a/1/2/c", False),
        ("/a/1?x/c", False),
        ("/get", False),
        ("/", False),
    ],
)
def test_paths_of_a_document_may_have_parameters(url: str, takes: bool) -> None:
    document: dict[str, Any] = {
        "paths": {"/a.b": {"post": {}}, "/a/{id}/c": {"get": {}, "post": {}}, "/get": {"get": {}}}
    }
    assert takes_post(document, url) is takes


@pytest.mark.parametrize("document", [None, [], {}, {"paths": []}, {"paths": {"/a": None}}])
def test_what_is_no_document_has_no_paths(document: Any) -> None:
    assert not takes_post(document, "/a")
