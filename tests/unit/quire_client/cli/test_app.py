"""The command line: output, exit codes and error lines."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from breaking_gateways import Break, Fault, breaking_gateways, text_after
from quire.inference.v1 import inference_pb2 as pb
from quire_client.cli.app import app, run

ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class Ended:
    """A process that ended."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))
    return {**os.environ, "PYTHONPATH": paths}


async def start(*args: str, stdout: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    """Starts `quire` as a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_client", *args),
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )


async def quire(*args: str, given: str = "") -> Ended:
    """Runs `quire` as a process of its own, with `given` on its standard input."""
    process = await start(*args)
    out, err = await asyncio.wait_for(process.communicate(given.encode()), 60)
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def invoke(*args: str, given: str | None = None) -> Result:
    """Runs a command in this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, args, given)


async def test_generate_streams_the_text(address: str, service: Any) -> None:
    service.answer("The", " capital", "…")

    result = await invoke("generate", "What?", "--temperature", "0", "--stop", "a", "--stop", "b", "--max-tokens", "9")

    assert (result.exit_code, result.stdout) == (0, "The capital…\n")
    sent = service.requests[0].generation
    assert (sent.text, sent.sampling.temperature, sent.stopping.max_tokens) == ("What?", 0.0, 9)
    assert list(sent.stopping.stop) == ["a", "b"]
    assert not sent.sampling.HasField("top_p")


async def test_generate_may_wait_for_ever(address: str, service: Any) -> None:
    service.answer("Paris.")
    ended = await invoke("generate", "What?", "--address", address, "--timeout", "inf")
    assert (ended.exit_code, ended.stdout) == (0, "Paris.\n")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("--json-schema", "schema.json"), "json_schema"),
        (("--grammar", "schema.json"), "grammar"),
        (("--regex", "[ab]"), "regex"),
        (("--choice", "a", "--choice", "b"), "choice"),
    ],
)
async def test_generate_sends_a_constraint(
    arguments: tuple[str, ...], kind: str, address: str, service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answer("a")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "object"}')

    assert (await invoke("generate", "What?", *arguments)).exit_code == 0
    assert service.requests[0].generation.constraint.WhichOneof("kind") == kind


async def test_generate_sends_token_ids_and_truncates_the_prompt(address: str, service: Any) -> None:
    service.answer("a")
    tokens = ("--stop-token-id", "3", "--stop-token-id", "4", "--allowed-token-id", "5")
    biases = ("--logit-bias", "6=-1.5", "--logit-bias", "7=2")
    prompt = ("--echo", "--truncate-prompt-tokens=-1", "--truncation-side", "right")

    assert (await invoke("generate", "What?", *tokens, *biases, *prompt)).exit_code == 0
    sent = service.requests[0].generation
    assert (list(sent.stopping.stop_token_ids), list(sent.sampling.allowed_token_ids)) == ([3, 4], [5])
    assert dict(sent.sampling.logit_bias) == {6: -1.5, 7: 2}
    assert (sent.echo, sent.truncate_prompt_tokens) == (True, -1)
    assert sent.truncation_side == pb.TRUNCATION_SIDE_RIGHT


@pytest.mark.parametrize(("sequences", "expected"), [("1", "Once upon\n"), ("2", "[0] Once upon\n[1] Once upon\n")])
async def test_generate_writes_the_prompt_before_each_text(
    sequences: str, expected: str, address: str, service: Any
) -> None:
    service.accept()
    service.script.append(pb.StreamGenerateResponse(prompt=pb.Prompt(token_ids=[1], text="Once")))
    for index in range(int(sequences)):
        service.say(" upon", index=index)
        service.end(index)
    service.account()

    result = await invoke("generate", "Once", "--echo", "--n", sequences)
    assert (result.exit_code, result.stdout) == (0, expected)


@pytest.mark.parametrize("bias", ["6", "6=", "=1", "a=1", "6=b"])
async def test_a_bias_has_a_token_and_a_number(bias: str, address: str) -> None:
    result = await invoke("generate", "What?", "--logit-bias", bias)
    assert result.exit_code == 2
    assert "--logit-bias" in result.stderr


async def test_generate_takes_one_constraint(address: str) -> None:
    result = await invoke("generate", "What?", "--regex", "a", "--choice", "b")

    assert result.exit_code == 2
    assert "one constraint" in result.stderr


async def test_generate_reads_standard_input(address: str, service: Any) -> None:
    service.answer("ok")

    assert (await invoke("generate", "-", given="two\nlines\n")).exit_code == 0
    assert service.requests[0].generation.text == "two\nlines"


async def test_an_error_after_some_text_is_on_a_new_line(address: str, service: Any) -> None:
    service.accept()
    service.say("Once")
    service.break_off(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error 1f")

    ended = await quire("generate", "x")

    assert (ended.code, ended.out) == (1, "Once\n")
    assert ended.err.startswith("quire: internal error 1f; ")


async def test_generate_as_json_has_all_fields(address: str, service: Any) -> None:
    service.accept(seed=99)
    logprob = pb.TokenLogprob(token_id=1, text="é", token_bytes=b"\xc3\xa9", logprob=-0.5)
    service.say("é", (1,), logprobs=[logprob], finish=pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=2))
    service.account()

    result = await invoke("generate", "x", "--logprobs", "0", "-o", "json")

    printed = json.loads(result.stdout)
    assert printed["acceptance"]["seed"] == 99
    (completion,) = printed["completions"]
    assert (completion["text"], completion["finish"]) == ("é", {"reason": "stop", "matched": 2})
    assert completion["logprobs"][0]["token_bytes"] == [0xC3, 0xA9]


async def test_json_loses_no_character_where_the_encoding_is_not_utf_8(
    address: str, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    service.answer("é…")

    written = await quire("generate", "x", "--address", address)
    printed = await quire("generate", "x", "--address", address, "--json")

    assert (written.code, written.out) == (0, "??\n")
    (completion,) = json.loads(printed.out)["completions"]
    assert completion["text"] == "é…"


async def test_generate_writes_several_sequences_one_after_another(address: str, service: Any) -> None:
    service.accept()
    service.say("b", index=1)
    service.say("a", index=0)
    service.end(0)
    service.end(1)
    service.account()

    assert (await invoke("generate", "x", "--n", "2")).stdout == "[0] a\n[1] b\n"


async def test_generate_does_not_stream_ranked_sequences(address: str, service: Any) -> None:
    completions = [pb.Completion(index=index, text=text, score=-index) for index, text in enumerate("ab")]
    service.whole = pb.GenerateResponse(completions=completions)

    beams = await invoke("generate", "x", "--beam-width", "4", "--n", "2", "--early-stopping", "true")
    best = await invoke("generate", "x", "--best-of", "3")
    printed = await invoke("generate", "x", "--best-of", "3", "-o", "json")

    assert (beams.stdout, best.stdout) == ("[0] a\n[1] b\n", "a\n")
    assert [one["score"] for one in json.loads(printed.stdout)["completions"]] == [0, -1]
    search, drawn = service.requests[0].generation, service.requests[1].generation
    assert (search.beam_search.width, search.n) == (4, 2)
    assert search.beam_search.early_stopping == pb.EARLY_STOPPING_AT_WIDTH
    assert (drawn.best_of, drawn.HasField("beam_search")) == (3, False)


async def test_generate_resumes_where_a_gateway_ends_and_reports_it() -> None:
    async with breaking_gateways(2, 2) as (first, second):
        first.breaks = [Break(3, Fault.STOPS)]

        ended = await quire("generate", "x", "--address", f"{first.address},{second.address}", "--n", "2")

    assert (ended.code, ended.out) == (0, "".join(f"[{i}] {text_after(i, n, True)}\n" for i, n in enumerate((7, 4))))
    (line,) = [line for line in ended.err.splitlines() if line.startswith("quire: ")]  # grpc logs at its exit, too
    assert line.startswith("quire: no connection to ")
    assert line.endswith("; going on")


async def test_resume_writes_the_output_of_a_named_request(address: str, service: Any) -> None:
    service.accept("mine")
    service.say("b", index=1)
    service.say("a", index=0)
    service.end(0)
    service.end(1)
    service.account()

    assert (await invoke("resume", "mine")).stdout == "a\n[1] b\n"
    printed = json.loads((await invoke("resume", "mine", "-o", "json")).stdout)
    assert [one["text"] for one in printed["completions"]] == ["a", "b"]
    assert [request.request_id for request in service.requests] == ["mine", "mine"]


async def test_resuming_an_unknown_request_fails(
    address: str, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.refuse_with_details(grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN", "there is no such request")

    assert await asyncio.to_thread(run, ["resume", "gone"]) == 1

    assert "quire: there is no such request; it ended more than an hour ago" in capsys.readouterr().err


async def test_models_lists_what_is_served(address: str) -> None:
    assert "tiny" in (await invoke("models")).stdout
    listed = json.loads((await invoke("models", "-o", "json")).stdout)
    assert listed == [{"name": "tiny", "context_length": 64, "vocab_size": 512, "aliases": ["small"]}]


async def test_bench_prints_latency_and_throughput(address: str, service: Any) -> None:
    service.answer("a", "b", "c", "d", "e", "f", "g", "h")
    mix = json.dumps({"requests": [{"prompt_token_ids": [1, 2], "output_tokens": 8}]})

    ended = await quire("bench", "-n", "20", "-c", "4", "--mix", "/dev/stdin", given=mix)

    assert ended.code == 0, ended.err
    assert "inter-token latency, ms" in ended.out
    assert "20 requests, 40 prompt and 160 output tokens" in ended.out
    assert "20 of 20 requests" in ended.err


async def test_bench_as_json_takes_its_mix_from_the_vocabulary(address: str, service: Any) -> None:
    service.answer("a")

    ended = await quire("bench", "--requests", "3", "--warm-up", "0", "-o", "json")

    assert ended.code == 1  # one token arrived, regardless of the request
    assert "3 requests did not get as many tokens" in ended.err
    printed = json.loads(ended.out)
    assert (printed["model"], printed["num_short"], printed["summary"]["output_tokens"]) == ("tiny", 3, 3)
    prompts = [request.generation.token_ids.ids for request in service.requests[1:]]
    assert len(prompts) == 3
    assert max(max(prompt) for prompt in prompts) < 512


async def test_bench_prints_why_requests_failed(address: str, service: Any) -> None:
    service.accept()
    service.break_off(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error 1f")

    ended = await quire("bench", "--requests", "2", "--warm-up", "0")

    assert ended.code == 1
    assert "quire: 2 requests failed: internal error 1f" in ended.err


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


def test_a_mix_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--mix", "/nonexistent/mix.json"]) == 2
    assert capsys.readouterr().err == "quire: /nonexistent/mix.json: no such file or directory\n"


def test_the_ca_file_of_a_measured_server_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_CA_FILE", "/nonexistent/ca.crt")
    assert run(["bench", "--url", "https://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "quire: QUIRE_CA_FILE: /nonexistent/ca.crt: no such file or directory\n"


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
