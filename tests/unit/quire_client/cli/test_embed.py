"""`quire embed`: texts from arguments, standard input or a file, as lines of numbers or as JSON."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from quire.inference.v1 import inference_pb2 as pb
from quire_client.cli import texts as command
from quire_client.cli.app import app, run


async def invoke(*args: str, given: str | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["embed", *args], given)


def texts_of(service: Any) -> list[list[str]]:
    """The inputs of each call."""
    return [[one.text for one in request.inputs] for request in service.requests]


async def test_each_text_is_a_line_of_numbers(address: str, service: Any) -> None:
    result = await invoke("a b", "c", "--model", "small", "--dimensions", "2")

    assert (result.exit_code, result.stdout) == (0, "0 0.5\n1 0.5\n")
    assert texts_of(service) == [["a b", "c"]]
    assert (service.requests[0].model, service.requests[0].dimensions) == ("small", 2)


async def test_options_are_those_of_the_request(address: str, service: Any) -> None:
    options = ["--pooling", "cls", "--no-normalize", "--truncate-prompt-tokens", "-1", "--priority", "3"]
    assert (await invoke("x", *options)).exit_code == 0
    assert (await invoke("x")).exit_code == 0

    given, absent = service.requests
    assert (given.pooling, given.normalize, given.truncate_prompt_tokens, given.priority) == (
        pb.POOLING_CLS,
        False,
        -1,
        3,
    )
    assert not any(absent.HasField(name) for name in ("normalize", "truncate_prompt_tokens", "priority"))
    assert absent.pooling == pb.POOLING_UNSPECIFIED


async def test_numbers_are_the_floats_that_were_sent(address: str, service: Any) -> None:
    numbers = [0.1, 1 / 3, 1e-30, -16777217.0]
    service.vector = numbers

    (line,) = (await invoke("x")).stdout.splitlines()
    assert [struct.pack("f", float(one)) for one in line.split(" ")] == [struct.pack("f", one) for one in numbers]


async def test_lines_of_standard_input_are_texts(address: str, service: Any) -> None:
    result = await invoke(given=" one \r\n\ntwo")

    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 3)
    assert texts_of(service) == [[" one ", "", "two"]]


async def test_lines_of_a_file_are_texts(address: str, service: Any, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("é\u2028ü\nb\n")

    assert (await invoke("--file", str(tmp_path / "lines"))).exit_code == 0
    assert texts_of(service) == [["é\u2028ü", "b"]]


async def test_json_is_one_object_for_all_calls(address: str, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_INPUTS_PER_CALL", 2)

    result = await invoke("--json", given="a\nb\nc\n")

    assert json.loads(result.stdout) == {
        "model": "tiny",
        "vectors": [[0, 0.5], [1, 0.5], [0, 0.5]],
        "usage": {"prompt_tokens": 8, "completion_tokens": 0, "cached_tokens": 2, "reasoning_tokens": 0},
    }
    assert texts_of(service) == [["a", "b"], ["c"]]


async def test_a_call_has_a_bounded_number_of_characters(
    address: str, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_CHARACTERS_PER_CALL", 3)

    assert (await invoke("ab", "c", "d", "efgh", "i")).exit_code == 0
    assert texts_of(service) == [["ab", "c"], ["d"], ["efgh"], ["i"]]


@pytest.mark.parametrize(
    ("arguments", "given", "where"),
    [
        ([], "a\nb\nc\n", "standard input, line 3"),
        (["--file", "lines"], "", "lines, line 3"),
        (["a", "b", "c"], "", "TEXT 3"),
    ],
)
async def test_an_error_names_the_text(
    arguments: list[str],
    given: str,
    where: str,
    address: str,
    service: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(command, "_INPUTS_PER_CALL", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").write_text("a\nb\nc\n")
    (tmp_path / "given").write_text(given)
    service.refusals.append(None)
    service.refuse_with_details(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "is too long", "inputs[0].text")
    with (tmp_path / "given").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert await asyncio.to_thread(run, ["embed", *arguments]) == 1

    assert capsys.readouterr().err == f"quire: {where}: is too long\n"


async def test_an_error_of_another_field_is_the_servers(
    address: str, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.refuse_with_details(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "must be at most 384", "dimensions")

    assert await asyncio.to_thread(run, ["embed", "x", "--dimensions", "999"]) == 1
    assert capsys.readouterr().err == "quire: dimensions: must be at most 384\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x", "--file", "/dev/null"], "--file"),
        (["--file", "/dev/null"], "TEXT"),
        (["--file", "/nonexistent"], "/nonexistent"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["embed", *arguments]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    assert run(["embed", "--file", str(tmp_path / "bytes")]) == 2
    assert f"{tmp_path / 'bytes'} is not text in UTF-8" in capsys.readouterr().err


async def test_a_text_that_is_too_long_has_a_remedy_of_this_command(
    address: str, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", "is too long", "inputs[0].text")
    service.refuse_with_details(*refusal)

    assert await asyncio.to_thread(run, ["embed", "a"]) == 1

    line = "quire: TEXT 1: is too long; shorten the text, or set --truncate-prompt-tokens\n"
    assert capsys.readouterr().err == line
