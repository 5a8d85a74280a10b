"""A batch has one answer for each line, whatever was stopped in its middle."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_client.batch.client import BatchClient
from quire_client.batch.input import open_input
from quire_client.batch.lines import BatchError
from quire_client.batch.output import open_output
from quire_client.batch.run import run_batch
from quire_client.batch.transport import HttpTransport
from quire_client.http_client import http_client
from scripted_http_api import Reply, ScriptedApi


async def run(
    api: ScriptedApi,
    path: str,
    concurrency: int = 4,
    on_end: Callable[[], None] = lambda: None,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Runs a batch, and returns the lines of its output."""
    output_path = Path(path).with_name("out.jsonl")
    with open_input(path) as batch, open_output(output_path, batch) as output:
        async with http_client(api.url, None, timeout) as http:
            await run_batch(batch, output, BatchClient(HttpTransport(api.url, http, 60)), concurrency, on_end)
    return [json.loads(line) for line in output_path.read_text().splitlines()]


def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The answers by custom_id, each of which is there once."""
    found = {line["custom_id"]: line["response"]["body"].get("text") for line in lines}
    assert len(found) == len(lines)
    return found


async def test_every_line_is_answered_and_so_many_are_in_flight(api: ScriptedApi, make_input: Any) -> None:
    ended: list[None] = []
    api.going.clear()
    running = asyncio.create_task(run(api, make_input(20), 4, lambda: ended.append(None)))
    while api.num_at_once < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    api.going.set()

    assert texts(await running) == {f"c{i}": str(i) for i in range(20)}
    assert (len(ended), api.most_at_once) == (20, 4)
    assert len({post.name for post in api.posts}) == 20


async def test_a_url_that_the_server_lacks_leaves_no_output(api: ScriptedApi, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/none", "body": {}}) + "\n")
    with pytest.raises(BatchError, match="/v1/none is no path of"):
        await run(api, str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]


async def test_a_complete_batch_needs_no_server(api: ScriptedApi, make_input: Any) -> None:
    path = make_input(3)
    before = await run(api, path)
    await api.stop()
    assert await run(api, path) == before
    assert not Path(path).with_name("out.jsonl.run").exists()


async def test_a_batch_goes_on_and_gets_the_answers_that_were_lost(api: ScriptedApi, make_input: Any) -> None:
    path, num_answers = make_input(30), 0

    def fail() -> None:
        nonlocal num_answers
        num_answers += 1
        if num_answers % 3 == 0:
            raise KeyError("killed")  # in the middle: answers of other requests are lost

    for _ in range(9):
        with pytest.raises(KeyError):
            await run(api, path, 4, fail)
    assert texts(await run(api, path)) == {f"c{i}": str(i) for i in range(30)}
    assert set(api.num_computed.values()) == {1}, "what the server had computed was not computed again"


async def test_a_cut_off_line_is_fetched_again(api: ScriptedApi, make_input: Any) -> None:
    path = make_input(3)
    api.script = [Reply(200, b"{}"), Reply.error(401, "the key has expired")]
    with pytest.raises(BatchError, match="has expired"):
        await run(api, path, 1)
    output = Path(path).with_name("out.jsonl")
    output.write_bytes(output.read_bytes()[:-5])
    assert texts(await run(api, path, 1)) == {"c0": "0", "c1": "1", "c2": "2"}


async def test_errors_are_lines_and_do_not_stop_the_others(api: ScriptedApi, make_input: Any) -> None:
    api.script = [Reply.error(400, "no")]
    lines = await run(api, make_input(5), 1)
    assert [line["response"]["status_code"] for line in lines] == [400, 200, 200, 200, 200]


async def test_refused_credentials_end_the_batch_at_once(api: ScriptedApi, make_input: Any) -> None:
    api.script = [Reply.error(401, "no such key")] * 100
    with pytest.raises(BatchError, match="no such key"):
        await run(api, make_input(100), 4)
    assert len(api.posts) <= 8


async def test_another_batch_of_the_same_requests_has_answers_of_its_own(api: ScriptedApi, make_input: Any) -> None:
    path = make_input(2)
    await run(api, path)
    Path(path).with_name("out.jsonl").unlink()
    await run(api, path)
    assert len(api.num_computed) == 4


async def test_a_request_that_is_not_answered_in_time_is_a_line_that_is_kept(api: ScriptedApi, make_input: Any) -> None:
    path = make_input(1, "/v1/embeddings")
    api.going.clear()
    (line,) = await run(api, path, timeout=0.1)
    assert line["response"] is None
    assert line["error"]["code"] == "request_timeout"
    assert len(api.posts) == 5
    assert await run(api, path) == [line]
    assert len(api.posts) == 5
