"""`quire chat`: line by line through a pipe, and interactively in a terminal."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from quire_client.cli.app import app, run
from terminal import CTRL_C, CTRL_D, Terminal, quire_in_terminal


async def invoke(*args: str, given: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, args, given)


def asked(service: Any) -> list[list[tuple[str, str]]]:
    """Roles and contents of each chat request."""
    return [
        [(m.role, m.content) for m in request.generation.chat.messages]
        for request in service.requests
        if hasattr(request, "generation")
    ]


async def test_each_line_of_a_pipe_is_a_message_of_one_conversation(address: str, service: Any) -> None:
    service.answer("Pa", "ris.")

    result = await invoke("chat", "--system", "Be brief.", "-t", "0", given="Capital?\n\nSure?\n")

    assert (result.exit_code, result.stdout) == (0, "Paris.\nParis.\n")
    first = [("system", "Be brief."), ("user", "Capital?")]
    assert asked(service) == [first, [*first, ("assistant", "Paris."), ("user", "Sure?")]]


async def test_a_line_of_a_pipe_may_be_a_command(address: str, service: Any) -> None:
    service.answer("Pa", "ris.")

    result = await invoke("chat", given="Capital?\n/reset\nSure?\n/quit\nMore?\n")

    assert (result.exit_code, result.stdout) == (0, "Paris.\nParis.\n")
    assert asked(service) == [[("user", "Capital?")], [("user", "Sure?")]]


async def test_as_json_each_answer_of_a_pipe_is_a_line(address: str, service: Any) -> None:
    service.answer("Pa", "ris.")

    result = await invoke("chat", "--json", given="Capital?\nSure?\n")

    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["completions"][0]["text"] for answer in answers] == ["Paris.", "Paris."]
    assert answers[0]["usage"]["completion_tokens"] == 2
    assert asked(service)[1] == [("user", "Capital?"), ("assistant", "Paris."), ("user", "Sure?")]


async def test_a_pipe_that_is_no_text_is_refused(address: str, service: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_client", "chat"), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(b"\xff\xfe\n"), 60)

    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"quire: Invalid value: standard input is not text in UTF-8")


async def test_an_error_in_a_pipe_ends_it(
    address: str, service: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service.refuse_with_details(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error 1f")
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert await asyncio.to_thread(run, ["chat"]) == 1

    assert "internal error 1f" in capsys.readouterr().err
    assert len(service.requests) == 1


@pytest.fixture
async def terminal(address: str) -> AsyncIterator[Terminal]:
    async with quire_in_terminal("chat") as terminal:
        yield terminal


async def test_a_terminal_keeps_the_conversation_until_reset(terminal: Terminal, service: Any) -> None:
    service.answer("Paris.")
    await terminal.shows("tiny: ")
    for line in ("Capital?", "Sure?", "/reset", "Again?"):
        await terminal.shows("> ")
        terminal.type(f"{line}\n")
        if not line.startswith("/"):
            await terminal.shows("Paris.")
    await terminal.shows("> ")
    terminal.type("/quit\n")

    assert await terminal.exit_code() == 0
    first = [("user", "Capital?")]
    assert asked(service) == [first, [*first, ("assistant", "Paris."), ("user", "Sure?")], [("user", "Again?")]]


async def test_ctrl_c_interrupts_an_answer_and_keeps_its_text(terminal: Terminal, service: Any) -> None:
    service.accept()
    service.say("Once upon")
    service.hold()
    await terminal.shows("> ")
    terminal.type("A tale?\n")
    await terminal.shows("Once upon")
    terminal.type(CTRL_C)
    await terminal.shows("> ")
    await asyncio.wait_for(service.cancelled.wait(), 60)

    service.script.clear()
    service.offsets.clear()
    service.answer("Fine.")
    terminal.type("And?\n")
    await terminal.shows("Fine.")
    await terminal.shows("> ")
    # A signal between the prompt and the read of a key is handled only at the next key.
    terminal.type(f"{CTRL_C}\n")
    await terminal.shows("> ")
    terminal.type(CTRL_D)

    assert await terminal.exit_code() == 0
    assert asked(service)[1] == [("user", "A tale?"), ("assistant", "Once upon"), ("user", "And?")]


async def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal) -> None:
    await terminal.shows("> ")
    terminal.type(CTRL_C + "\n")  # the key after the signal: see above
    await terminal.shows("Ctrl-C again or Ctrl-D leaves")
    await terminal.shows("> ")
    terminal.type(CTRL_C + "\n")

    assert await terminal.exit_code() == 0


async def test_json_needs_a_pipe(address: str) -> None:
    async with quire_in_terminal("chat", "--json") as terminal:
        await terminal.shows("needs messages on standard input")
        assert await terminal.exit_code() == 2


async def test_an_error_in_a_terminal_ends_nothing_and_the_question_is_forgotten(
    terminal: Terminal, service: Any
) -> None:
    await terminal.shows("> ")
    service.refuse_with_details(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error 1f")
    terminal.type("Capital?\n")
    await terminal.shows("quire: internal error 1f")
    await terminal.shows("> ")
    service.answer("Paris.")
    terminal.type("Capital?\n")
    await terminal.shows("Paris.")
    await terminal.shows("> ")
    terminal.type(CTRL_D)

    assert await terminal.exit_code() == 0
    assert asked(service) == [[("user", "Capital?")], [("user", "Capital?")]]


async def test_generated_escape_sequences_do_not_reach_the_terminal(terminal: Terminal, service: Any) -> None:
    service.answer("\x1b]0;owned\x07harm\x9b2Jless\ttab")
    await terminal.shows("> ")
    terminal.type("Hello\n")

    assert "\x1b" not in await terminal.shows("]0;ownedharm2Jless")


async def test_an_unknown_command_is_reported_and_not_sent(terminal: Terminal, service: Any) -> None:
    await terminal.shows("> ")
    terminal.type("/rest\n")
    await terminal.shows("there is no /rest")
    await terminal.shows("> ")
    terminal.type(CTRL_D)

    assert await terminal.exit_code() == 0
    assert asked(service) == []
