"""`quire run`: the chat and the server that it starts, a placeholder for which the gRPC server of the test answers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from placeholder_services import alive, until_gone
from terminal import CTRL_C, CTRL_D, Terminal, quire_in_terminal

# Reports as svc_common.supervisor.attached does. Its process id is in the file that the variable PID_FILE names.
SERVER = """
import json, os, pathlib, sys
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
*_, prompt = [None, *(one for one in sys.argv[1:] if one.startswith("PROMPT"))]
if "--broken" in sys.argv:
    print("quire: port 8000 is taken", file=sys.stderr)
    raise SystemExit(3)
print(json.dumps({"prompt": prompt}), flush=True)
if "--slow" in sys.argv:
    print("waiting for worker", file=sys.stderr, flush=True)
    sys.stdin.read()
    raise SystemExit
about = {"model": "tiny", "generates": "--encoder" not in sys.argv, "address": os.environ["QUIRE_ADDRESS"]}
print(json.dumps(about | {"http": "http://h:1", "api_key": "sesame", "log": "run/server.log"}), flush=True)
sys.stdin.read()
"""
PLACEHOLDER = f"""
import sys
from quire_client.cli import local_server
local_server.service_command = lambda module, *arguments: [sys.executable, "-c", {SERVER!r}, *arguments]
"""
PROGRAM = f"""
{PLACEHOLDER}
from quire_client.cli import main
sys.argv = ["quire", "run", *sys.argv[1:]]
main()
"""


@pytest.fixture(autouse=True)
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(path))
    return path


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`quire run`, with pipes for its standard streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*(sys.executable, "-c", PROGRAM, *arguments), **pipes)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def run(*arguments: str, given: str = "") -> tuple[int | None, str, str]:
    """Exit status, output and errors of `quire run` with `given` on its standard input."""
    async with started(*arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(given.encode()), 60)
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def in_terminal(*arguments: str) -> AsyncIterator[Terminal]:
    async with quire_in_terminal("run", *arguments, before=PLACEHOLDER) as terminal:
        yield terminal


def pid(file: Path) -> int:
    return int(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "given", "sent"),
    [
        (("m", "PROMPT a"), "", "PROMPT a"),
        (("m",), "two\nlines\n", "two\nlines"),
        (("m", "PROMPT a"), "text\n", "text\nPROMPT a"),
    ],
)
async def test_a_prompt_is_answered_and_the_server_ends(
    arguments: tuple[str, ...], given: str, sent: str, address: str, service: Any, pid_file: Path
) -> None:
    service.answer("Par", "is.")

    code, out, err = await run(*arguments, "--system", "Be brief.", "--top-k", "1", "--max-tokens", "9", given=given)

    assert (code, out, err) == (0, "Paris.\n", "")
    generation = service.requests[0].generation
    assert [one.content for one in generation.chat.messages] == ["Be brief.", sent]
    assert (generation.model, generation.sampling.top_k, generation.stopping.max_tokens) == ("tiny", 1, 9)
    assert service.metadata[0]["authorization"] == "Bearer sesame"
    assert not alive(pid(pid_file))


async def test_as_json_the_answer_has_all_fields(address: str, service: Any) -> None:
    service.answer("Par", "is.")

    code, out, _ = await run("m", "PROMPT", "--json")

    answer = json.loads(out)
    assert (code, answer["completions"][0]["text"], answer["usage"]["completion_tokens"]) == (0, "Paris.", 2)


async def test_flags_of_the_server_are_passed_on(address: str, service: Any) -> None:
    arguments = [
        "m",
        "-tp",
        "1",
        "--seed",
        "0",
        "--dtype=half",
        "--max-model-len",
        "-1",
        "PROMPT",
        "--no-enforce-eager",
    ]
    code, out, err = await run(*arguments, "--broken")
    assert (code, out, err) == (3, "", "quire: port 8000 is taken\n")

    service.answer("Paris.")
    assert (await run(*arguments))[0] == 0
    assert service.requests[0].generation.sampling.seed == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("m",), "PROMPT: standard input is empty"),
        (("m", "PROMPT", "--encoder"), "MODEL: tiny generates no text"),
        (("m", "PROMPT", "--top-k", "few"), "--top-k"),
    ],
)
async def test_misuse_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], text: str, address: str, service: Any, pid_file: Path
) -> None:
    code, out, err = await run(*arguments)

    assert (code, out) == (2, "")
    assert text in err
    assert len(err.splitlines()) == 1
    assert not pid_file.exists() or not alive(pid(pid_file))


async def test_in_a_terminal_it_chats_and_ctrl_d_ends_both(address: str, service: Any, pid_file: Path) -> None:
    service.answer("Paris.")
    async with in_terminal("m") as terminal:
        await terminal.shows("quire is ready: tiny on http://h:1 (OpenAI API) and ")
        await terminal.shows("its log is run/server.log")
        await terminal.shows("> ")
        terminal.type("Capital?\n")
        await terminal.shows("Paris.")
        await terminal.shows("> ")
        terminal.type(CTRL_D)
        assert await terminal.exit_code() == 0
    assert not alive(pid(pid_file))


async def test_ctrl_c_while_the_server_starts_ends_both(address: str, pid_file: Path) -> None:
    async with in_terminal("m", "--slow") as terminal:
        await terminal.shows("waiting for worker")
        terminal.type(CTRL_C)
        assert await terminal.exit_code() == 130
    assert not alive(pid(pid_file))


async def test_ctrl_c_interrupts_an_answer_and_not_the_server(address: str, service: Any, pid_file: Path) -> None:
    service.accept()
    service.say("Once upon")
    service.hold()
    async with in_terminal("m") as terminal:
        await terminal.shows("> ")
        terminal.type("A tale?\n")
        await terminal.shows("Once upon")
        terminal.type(CTRL_C)
        await terminal.shows("> ")
        await asyncio.wait_for(service.cancelled.wait(), 60)
        assert alive(pid(pid_file))
        terminal.type(CTRL_C + "\n")  # the key after the signal: see test_chat.py
        await terminal.shows("Ctrl-C again or Ctrl-D leaves")
        await terminal.shows("> ")
        terminal.type(CTRL_C + "\n")
        assert await terminal.exit_code() == 0
    assert not alive(pid(pid_file))


async def test_a_server_that_ends_in_an_answer_ends_the_chat(address: str, service: Any, pid_file: Path) -> None:
    service.accept()
    service.say("Once upon")
    service.hold()
    async with in_terminal("m") as terminal:
        await terminal.shows("> ")
        terminal.type("A tale?\n")
        await terminal.shows("Once upon")
        os.kill(pid(pid_file), signal.SIGKILL)
        await terminal.shows("quire: the server ended (exit status -9); its log is run/server.log")
        assert await terminal.exit_code() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_server_outlives_the_command(
    number: signal.Signals, address: str, service: Any, pid_file: Path
) -> None:
    service.accept()
    service.say("Once upon")
    service.hold()
    async with started("m", "PROMPT") as process:
        assert process.stdin
        process.stdin.close()
        await asyncio.wait_for(service.holding.wait(), 60)
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), 60)
        code = 128 + number if number == signal.SIGTERM else -number
        assert (process.returncode, err.decode()) == (code, "")
    await until_gone([pid(pid_file)])


async def test_json_needs_a_prompt(address: str, pid_file: Path) -> None:
    async with in_terminal("m", "--json") as terminal:
        await terminal.shows("--json: needs a prompt")
        assert await terminal.exit_code() == 2
    assert not alive(pid(pid_file))
