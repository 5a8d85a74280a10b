"""`quire chat`: line by line through a pipe, and interactively in a terminal."""

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from quire_client.cli.app import app, run

ROOT = Path(__file__).parents[4]
CTRL_C = "\x03"
CTRL_D = "\x04"


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


# Makes standard input the controlling terminal, which Ctrl-C needs: in the new process, because grpc forbids fork.
_CHAT = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["quire", "chat"]
runpy.run_module("quire_client", run_name="__main__")
"""


class Terminal:
    """`quire chat` in a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, keyboard_and_screen: int) -> None:
        self._process = process
        self._device = keyboard_and_screen
        self._unread = ""

    async def shows(self, text: str) -> str:
        """Waits until the screen shows `text`; returns the new output up to it."""
        while text not in self._unread:
            try:
                data = await asyncio.wait_for(asyncio.to_thread(os.read, self._device, 4096), 60)
            except TimeoutError:
                raise AssertionError(f"the screen showed {self._unread!r} and no {text!r}") from None
            except OSError:  # the other end is closed
                data = b""
            assert data, f"the screen showed {self._unread!r} and no {text!r}"
            self._unread += data.decode()
        shown, _, self._unread = self._unread.partition(text)
        return shown

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._device, keys.encode())

    async def exit_code(self) -> int:
        """Waits for the end."""
        return await asyncio.wait_for(self._process.wait(), 60)


@pytest.fixture
async def terminal(address: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    paths = os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHAT),
        env={**os.environ, "PYTHONPATH": paths, "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    yield Terminal(process, ours)
    if process.returncode is None:
        process.kill()
        await process.wait()
    os.close(ours)


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
