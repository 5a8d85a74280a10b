"""The command line: output, exit codes and error lines."""

import asyncio
import json
import os
import signal
from typing import Any

import grpc
import pytest

from quire_client.cli.app import run
from quire_command import invoke, quire, start


async def test_models_lists_what_is_served(address: str) -> None:
    assert "tiny" in (await invoke("models")).stdout
    listed = json.loads((await invoke("models", "-o", "json")).stdout)
    assert listed == [{"name": "tiny", "context_length": 64, "vocab_size": 512, "aliases": ["small"]}]


@pytest.mark.parametrize("args", [["generate", "x"], ["bench", "--warm-up", "0"]])
async def test_ctrl_c_ends_it_without_a_word(address: str, service: Any, args: list[str]) -> None:
    service.accept()
    service.say("Once upon")
    service.hold()
    process = await start(*args)
    await asyncio.wait_for(service.holding.wait(), 60)
    process.send_signal(signal.SIGINT)

    _, err = await asyncio.wait_for(process.communicate(), 60)

    assert (process.returncode, err) == (130, b"")
    await asyncio.wait_for(service.cancelled.wait(), 60)


async def test_a_reader_that_has_enough_is_no_error(address: str, service: Any) -> None:
    service.accept()
    for _ in range(300):
        service.say("more " * 200)  # in total more than a pipe's buffer
    service.hold()
    ours, theirs = os.pipe()
    process = await start("generate", "x", stdout=theirs)
    os.close(theirs)
    await asyncio.to_thread(os.read, ours, 4)
    os.close(ours)

    _, err = await asyncio.wait_for(process.communicate(), 60)

    assert (process.returncode, err) == (1, b"")
    await asyncio.wait_for(service.cancelled.wait(), 60)


@pytest.mark.parametrize("args", [["--version"], ["completion", "bash"]])
async def test_output_that_cannot_be_written_is_an_error_of_one_line(args: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start(*args, stdout=full)
    os.close(full)

    _, err = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 1
    assert err == b"quire: No space left on device\n"


async def test_the_version_is_printed() -> None:
    ended = await quire("--version")

    assert ended.code == 0
    assert ended.out.startswith("quire ")


async def test_at_an_http_port_one_line_says_which_port_to_name() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        ended = await quire("models", "--address", address)

    assert (ended.code, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert line.startswith(f"quire: no gRPC at {address}: a server responds there in HTTP/1.1; ")
    assert "50051" in line


async def test_an_address_without_a_port_says_which_one_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["models", "--address", "127.0.0.1"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("quire: no connection to 127.0.0.1, port 443 (the address has no port); ")


async def test_a_deadline_that_is_too_short_names_the_flag(
    address: str, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.refuse_with_details(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT", "it would end too late")
    assert await asyncio.to_thread(run, ["generate", "x"]) == 1
    assert capsys.readouterr().err == "quire: it would end too late; raise --timeout\n"


async def test_without_a_server_one_line_says_how_to_start_it() -> None:
    ended = await quire("generate", "x", "--address", "127.0.0.1:1")

    assert ended.code == 1
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert line.startswith("quire: no connection to 127.0.0.1:1; ")
    assert "make run" in line


@pytest.mark.parametrize(
    ("code", "reason", "message", "field_path", "next_step"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "no such key", None, "--api-key"),
        (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no such model", "model", "quire models"),
        (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", "too long", "text", "--max-tokens"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA_EXCEEDED", "slow down", None, "try again in 2 s"),
    ],
)
async def test_an_error_has_message_field_and_advice(
    address: str,
    service: Any,
    capsys: pytest.CaptureFixture[str],
    code: grpc.StatusCode,
    reason: str,
    message: str,
    field_path: str | None,
    next_step: str,
) -> None:
    retry_after = 2 if code is grpc.StatusCode.RESOURCE_EXHAUSTED else None
    service.refuse_with_details(code, reason, message, field_path, retry_after)

    assert await asyncio.to_thread(run, ["generate", "x"]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: {field_path}: {message}; " if field_path else f"quire: {message}; ")
    assert next_step in line


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["generat"], "generat"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--tempratur", "0"], "--tempratur"),
        (["generate", "x", "--top-k", "few"], "--top-k"),
        (["generate", "x", "--logprobs", "2"], "--logprobs"),
        (["generate", "x", "--prompt-logprobs", "2"], "--prompt-logprobs"),
        (["generate", "x", "--timeout", "nan"], "--timeout"),
        (["generate", "x", "--timeout", "1e300"], "--timeout"),
        (["explain", "--limit", "0"], "--limit"),
        (["bench", "--concurrency", "0"], "--concurrency"),
        (["bench", "--url", "127.0.0.1:8000"], "--url"),
        (["bench", "--url", "http://[::1"], "--url"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: ")
    assert named in line


@pytest.mark.parametrize(("args", "help_of"), [(["generate", "x", "--foo"], "quire generate"), (["foo"], "quire")])
def test_misuse_names_the_help_of_its_command(
    args: list[str], help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    assert capsys.readouterr().err.endswith(f"({help_of} --help lists what there is)\n")


def test_without_a_command_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["profile", "foo"], "Invalid value for 'ACTION': 'foo' is not one of 'start', 'stop'."),
        (["completion", "powershell"], "Invalid value for 'SHELL': 'powershell' is not one of 'bash', 'zsh', 'fish'."),
        (
            ["embed", "a", "--pooling", "foo"],
            "Invalid value for '--pooling': 'foo' is not one of 'mean', 'cls', 'last'.",
        ),
    ],
)
def test_a_value_that_is_no_choice_is_named_in_plain_words(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    assert capsys.readouterr().err == f"quire: {message} (quire {args[0]} --help lists what there is)\n"


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("generate", "quire generate [OPTIONS] PROMPT"),
        ("run", "quire run [OPTIONS] [MODEL [PROMPT]]"),
        ("batch", "quire batch [OPTIONS] FILE"),
        ("quantize", "quire quantize [OPTIONS] MODEL OUT"),
        ("embed", "quire embed [OPTIONS] [TEXT]..."),
    ],
)
def test_the_help_shows_arguments_and_switches_plainly(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: {usage} " in text
    assert "<bool>" not in text


@pytest.mark.parametrize("command", ["generate", "resume", "chat", "models", "batch", "bench", "explain"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"quire {command}" in capsys.readouterr().out
