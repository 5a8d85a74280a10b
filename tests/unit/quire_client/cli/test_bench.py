"""`quire bench`: what it prints, and what it refuses."""

import json
from typing import Any

import grpc
import pytest

from quire_client.cli.app import run
from quire_command import quire


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


def test_a_mix_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--mix", "/nonexistent/mix.json"]) == 2
    assert capsys.readouterr().err == "quire: /nonexistent/mix.json: no such file or directory\n"


def test_the_ca_file_of_a_measured_server_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_CA_FILE", "/nonexistent/ca.crt")
    assert run(["bench", "--url", "https://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "quire: QUIRE_CA_FILE: /nonexistent/ca.crt: no such file or directory\n"
