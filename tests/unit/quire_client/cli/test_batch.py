"""`quire batch`: output, exit codes, error lines, and its process killed."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire_client.cli.app import run
from scripted_http_api import Reply, ScriptedApi, scripted_api

ROOT = Path(__file__).parents[4]
LINE = '{{"custom_id": "c{0}", "method": "POST", "url": "/v1/completions", "body": {{"prompt": "{0}"}}}}\n'


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        yield api


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An input of 12 lines."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(LINE.format(i) for i in range(12)))
    return path


async def start(*args: object) -> Process:
    """Starts `quire batch` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))}
    command = [sys.executable, "-m", "quire_client", "batch", *map(str, args)]
    return await asyncio.create_subprocess_exec(*command, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def ended(process: Process, given: bytes = b"") -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    out, err = await asyncio.wait_for(process.communicate(given), 60)
    return process.returncode, out.decode(), err.decode()


async def batch(*args: object) -> int:
    """Runs `quire batch` in this process."""
    return await asyncio.to_thread(run, ["batch", *map(str, args)])


def ids(path: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


async def test_the_answers_are_beside_the_requests(
    api: ScriptedApi, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await batch(path, "--url", api.url) == 0

    assert ids(path.with_name("in.out.jsonl")) == sorted(f"c{i}" for i in range(12))
    printed = capsys.readouterr()
    assert printed.out == f"12 requests, 0 errors: {path.with_name('in.out.jsonl')}\n"
    assert "12 of 12 requests, 0 errors" in printed.err


async def test_the_output_cannot_be_standard_output(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await batch(path, "-o", "-") == 2
    assert "--output: must be a file" in capsys.readouterr().err
    assert not Path("-").exists()


async def test_the_key_of_the_environment_is_sent(
    api: ScriptedApi, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert await batch(path, "--url", api.url) == 0
    assert {post.authorization for post in api.posts} == {"Bearer secret"}


async def test_a_summary_as_json_counts_errors(
    api: ScriptedApi, path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    api.script = [Reply.error(400, "no")]
    output = tmp_path / "answers"

    assert await batch(path, "-o", output, "--url", api.url, "--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert {"requests": 12, "answered_before": 0, "errors": 1, "output": str(output)}.items() <= summary.items()

    assert await batch(path, "-o", output, "--url", api.url, "--json") == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["answered_before"], summary["errors"]) == (12, 1)
    assert "12 requests are answered already" in printed.err


async def test_requests_may_come_from_standard_input(api: ScriptedApi, path: Path, tmp_path: Path) -> None:
    process = await start("-", "-o", tmp_path / "out", "--url", api.url)
    code, _, err = await ended(process, path.read_bytes())
    assert code == 0, err
    assert len(ids(tmp_path / "out")) == 12


async def test_a_client_that_is_killed_goes_on_where_it_was(api: ScriptedApi, path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for number in range(1, 4):
        api.going.clear()
        process = await start(path, "-o", output, "--url", api.url, "-c", 3)
        while api.num_at_once < 3:
            await asyncio.sleep(0.01)
        if number > 1:  # the first one is killed before it has an answer
            api.going.set()
            while not output.exists() or output.read_bytes().count(b"\n") < number:
                await asyncio.sleep(0.001)
        process.kill()
        await ended(process)
        api.going.set()
        while api.num_at_once:
            await asyncio.sleep(0.01)

    assert (await ended(await start(path, "-o", output, "--url", api.url)))[0] == 0

    assert ids(output) == sorted(f"c{i}" for i in range(12))
    assert len(api.num_computed) == 12, "each request has had one name"
    assert set(api.num_computed.values()) == {1}


async def test_two_processes_do_not_write_one_output(api: ScriptedApi, path: Path, tmp_path: Path) -> None:
    api.going.clear()
    first = await start(path, "-o", tmp_path / "out", "--url", api.url)
    while not api.posts:
        await asyncio.sleep(0.01)
    code, out, err = await ended(await start(path, "-o", tmp_path / "out", "--url", api.url))
    assert (code, out, err) == (1, "", f"quire: {tmp_path / 'out'}: another `quire batch` is writing it\n")
    api.going.set()
    assert (await ended(first))[0] == 0


async def test_ctrl_c_ends_it_and_it_goes_on_later(api: ScriptedApi, path: Path, tmp_path: Path) -> None:
    api.going.clear()
    process = await start(path, "-o", tmp_path / "out", "--url", api.url)
    while not api.posts:
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert await ended(process) == (130, "", "")
    api.going.set()
    assert (await ended(await start(path, "-o", tmp_path / "out", "--url", api.url)))[0] == 0
    assert len(ids(tmp_path / "out")) == 12


async def test_a_server_that_cannot_be_reached_is_named_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await batch(path, "--url", "http://127.0.0.1:1", "--server-timeout", "0") == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == "quire: requests are sent again: no connection to http://127.0.0.1:1"
    assert last.startswith("quire: no connection to http://127.0.0.1:1 for 0 s; ")


async def test_without_limits_it_waits_for_ever(api: ScriptedApi, path: Path) -> None:
    assert await batch(path, "--url", api.url, "--timeout", "inf", "--server-timeout", "inf") == 0


async def test_fields_without_effect_are_named(
    api: ScriptedApi, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(LINE.format(1).replace("}}", '}, "temperature": 0}'))
    assert await batch(path, "--url", api.url) == 0
    assert "quire: fields of lines that have no effect: temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "problem"),
    [
        (["absent"], 1, "quire: absent: no such file or directory"),
        (["."], 1, "quire: .: is a directory"),
        (["-"], 2, "--output"),
        (["x", "--url", "127.0.0.1"], 2, "--url"),
        (["x", "-c", "0"], 2, "--concurrency"),
        (["x", "--timeout", "nan"], 2, "--timeout"),
        (["x", "--timeout", "1e300"], 2, "--timeout"),
        (["x", "--server-timeout", "nan"], 2, "--server-timeout"),
        ([], 2, "FILE"),
    ],
)
def test_misuse_is_one_line(args: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", *args]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
