"""`quire run` with a real model: an answer, a chat beside other clients, and an end without processes left behind."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from environments import bare_environment
from placeholder_services import PORTS, alive, until_gone
from terminal import CTRL_D, quire_in_terminal

START_SECONDS = 240.0


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state file of the server. All its ports are free ones, and its files are in a directory of the test."""
    own = {f"QUIRE_{port}_PORT": "0" for port in PORTS} | {
        "QUIRE_RUN_DIR": str(tmp_path / "run"),
        "QUIRE_STATE_FILE": str(tmp_path / "state.json"),
        "QUIRE_CPU_KV_BYTES": str(2**27),
    }
    for name in set(os.environ) - set(bare_environment("QUIRE_CACHE_DIR")):
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "state.json"


def pids(state: Path) -> list[int]:
    values = json.loads(state.read_text())
    return [values["supervisor"], *(role["pid"] for role in values["roles"].values())]


async def run(*arguments: str, given: str = "") -> tuple[int | None, str, str]:
    """Exit status, output and errors of `quire run`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_client", "run", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(given.encode()), START_SECONDS)
    return process.returncode, out.decode(), err.decode()


async def test_a_prompt_is_answered_by_the_default_model(model: Path, state: Path) -> None:
    arguments = (str(model), "What is the capital of France?", "--temperature", "0", "--json", "--max-model-len", "512")
    code, out, err = await run(*arguments, "--max-tokens", "20", given="Answer in one sentence.\n")

    assert code == 0, err
    answer = json.loads(out)
    assert "Paris" in answer["completions"][0]["text"]
    assert answer["acceptance"]["model"] == model.name
    assert not state.exists()
    assert "listening" not in err  # the log has it


async def test_a_chat_and_other_clients_until_the_chat_ends(tiny_model: Path, state: Path, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    arguments = (str(tiny_model), "--uds", str(path), "--api-key", "a-key-of-this-test", "--max-logprobs", "128")
    async with quire_in_terminal("run", *arguments, "--max-tokens", "3") as terminal:
        ready = await terminal.shows(" (gRPC)", START_SECONDS)
        assert f"unix:{path}" in ready
        await terminal.shows("> ")
        terminal.type("Hello\n")
        await terminal.shows("> ")
        server = pids(state)
        assert all(map(alive, server))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        headers = {"authorization": "Bearer a-key-of-this-test"}
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", headers=headers) as http:
            body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "return_tokens_as_token_ids": True}
            asked = body | {"logprobs": 128, "prompt_logprobs": 128}
            (choice,) = (await http.post("/v1/completions", json=asked, timeout=60)).json()["choices"]
            found = [*choice["logprobs"]["top_logprobs"], *choice["prompt_logprobs"][1:]]
            assert [len(top) in (128, 129) for top in found] == [True] * 4  # the token itself may be another one
            assert (await http.get("/v1/models", headers={"authorization": "Bearer another"})).status_code == 401
        terminal.type(CTRL_D)
        assert await terminal.exit_code() == 0
    assert not any(map(alive, server))
    assert not path.exists()
    assert (tmp_path / "run" / "server.log").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_process_is_left_behind_if_the_chat_is_killed_in_an_answer(
    number: signal.Signals, tiny_model: Path, state: Path
) -> None:
    async with quire_in_terminal("run", str(tiny_model), "--log-level", "info") as terminal:
        await terminal.shows("> ", START_SECONDS)
        terminal.type("Hello\n")  # answered with random tokens, as many as the context holds
        server = pids(state)
        terminal.process.send_signal(number)
        await terminal.exit_code()
    await until_gone(server)


async def test_a_port_in_use_is_reported_and_nothing_stays(
    tiny_model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        code, out, err = await run(str(tiny_model), "Hello", "--port", str(port))
    assert (code, out) == (1, "")
    assert err.startswith(f"quire: 127.0.0.1:{port} is already in use")
    assert "QUIRE_HTTP_PORT" in err
    assert not state.exists()
