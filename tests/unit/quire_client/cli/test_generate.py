"""`quire generate` and `quire resume`: what they send and write."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from breaking_gateways import Break, Fault, breaking_gateways, text_after
from quire.inference.v1 import inference_pb2 as pb
from quire_client.cli.app import run
from quire_command import invoke, quire


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
