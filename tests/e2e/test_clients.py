"""Quire as users run it: the default start, with Quire's own clients and clients of other projects."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, Chunk, Client, QuireError

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CHAT = [{"role": "user", "content": QUESTION}]
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    with deployment() as started:
        yield started


def test_supervisor_says_when_it_is_ready_and_how_to_try_it(running: Deployment) -> None:
    log = running.log.read_text()
    assert log.count("quire is ready") == 1
    call = next(line for line in log.splitlines() if line.strip().startswith("curl"))
    tried = subprocess.run(call.strip(), shell=True, capture_output=True, text=True, check=True)
    events = [line[6:] for line in tried.stdout.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events) == ANSWER


@pytest.mark.parametrize("place", range(3), ids=["curl", "python", "reflection"])
def test_readmes_examples_answer(running: Deployment, place: int) -> None:
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    language, code = [block for block in blocks if QUESTION in block[1]][place]
    code = code.replace("http://127.0.0.1:8000", running.http).replace("127.0.0.1:50051", running.grpc)
    call = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code.replace(".venv/bin", str(BIN))]
    environment = os.environ | {"QUIRE_ADDRESS": running.grpc}
    tried = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
    pieces = re.findall(r'"(?:text|content)": ?"([^"]*)"', tried.stdout)
    assert (tried.stdout if language == "python" else "".join(pieces)) == ANSWER


def test_sync_client_streams(running: Deployment) -> None:
    with Client(running.grpc) as client:
        assert "".join(chunk.text for chunk in client.stream_chat(CHAT, temperature=0)) == ANSWER


async def test_async_client_answers_whole(running: Deployment) -> None:
    async with AsyncClient(running.grpc) as client:
        answer = await client.chat(CHAT, temperature=0)
    assert (answer.text, answer.finish_reason) == (ANSWER, "stop")
    assert answer.usage.completion_tokens == len(answer.token_ids)


def test_reflection_client_streams(running: Deployment) -> None:
    body = json.dumps({"generation": {"chat": {"messages": CHAT}, "sampling": {"temperature": 0}}})
    url = f"http://{running.grpc}/quire.inference.v1.InferenceService/StreamGenerate"
    call = [str(BIN / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", body, url]
    tried = subprocess.run(call, capture_output=True, text=True, check=True)
    decoder, text, messages = json.JSONDecoder(), tried.stdout.strip(), []
    while text:
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:].lstrip()
    assert "".join(message.get("chunk", {}).get("text", "") for message in messages) == ANSWER
    assert "acceptance" in messages[0]
    assert "usage" in messages[-1]


async def test_official_openai_client_streams(running: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_command_line_answers(running: Deployment) -> None:
    for arguments, expected in (
        (["models"], "smollm2-135m-instruct"),
        (["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "1"], " Paris"),
        (["bench", "--requests", "2", "--concurrency", "2", "-o", "json"], '"output_tokens_per_second"'),
    ):
        call = [str(BIN / "quire"), *arguments, "--address", running.grpc]
        assert expected in subprocess.run(call, capture_output=True, text=True, check=True).stdout


async def test_seed_repeats_a_draw_and_sequences_of_one_request_differ(running: Deployment) -> None:
    async with AsyncClient(running.grpc) as client:
        first = await client.generate("Once upon a time", max_tokens=16, temperature=1, n=3)
        again = await client.generate("Once upon a time", max_tokens=16, temperature=1, n=3, seed=first.seed)
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in first.completions]
    assert len({c.token_ids for c in first.completions}) == 3


async def test_stop_string_is_cut_and_named(running: Deployment) -> None:
    async with AsyncClient(running.grpc) as client:
        answer = await client.chat(CHAT, temperature=0, stop=" is Par")
    assert answer.text == "The capital of France"
    assert answer.completions[0].finish.matched == " is Par"


async def test_logprobs_come_with_each_token(running: Deployment) -> None:
    async with AsyncClient(running.grpc) as client:
        answer = await client.chat(CHAT, temperature=0, logprobs=3)
    assert len(answer.logprobs) == len(answer.token_ids)
    for token in answer.logprobs:
        assert len(token.top) == 3
        assert token.top[0].logprob == pytest.approx(token.logprob)  # greedy sampling takes the most probable token
    assert "".join(token.token for token in answer.logprobs[:-1]) == ANSWER


async def test_gateway_that_is_killed_comes_back(running: Deployment) -> None:
    running.kill("gateway")
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as client, asyncio.timeout(200):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    async with AsyncClient(running.grpc) as client:
        assert (await client.chat(CHAT, temperature=0)).text == ANSWER


@pytest.mark.parametrize("role", ["gateway", "scheduler", "worker"])
async def test_stream_goes_on_where_a_process_is_killed(running: Deployment, role: str) -> None:
    async with AsyncClient(running.grpc) as client:
        stream = client.stream("Once", max_tokens=100, temperature=0, ignore_eos=True)
        chunks: list[Chunk] = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5:
                running.kill(role)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert len(tokens) == 100
        text = await client.detokenize(tokens)
    assert "".join(chunk.text for chunk in chunks) == text
    assert (stream.num_resumes > 0) == (role == "gateway")


def test_blocking_stream_goes_on_where_the_gateway_is_killed(running: Deployment) -> None:
    broken_by: list[QuireError] = []
    with Client(running.grpc) as client:
        stream = client.stream("Once", max_tokens=100, temperature=0, ignore_eos=True, on_resume=broken_by.append)
        tokens: list[int] = []
        for chunk in stream:
            if not tokens:
                running.kill("gateway")
            tokens += chunk.token_ids
    assert len(tokens) == 100
    assert [error.code.name for error in broken_by] == ["UNAVAILABLE"]


async def test_named_request_outlives_its_client(running: Deployment) -> None:
    async with AsyncClient(running.grpc) as client:
        async for _ in client.stream("Once", max_tokens=60, temperature=0, ignore_eos=True, request_id="left"):
            break
    async with AsyncClient(running.grpc) as client:
        first = await client.resume("left").collect()
        again = await client.generate("Once", max_tokens=60, temperature=0, ignore_eos=True, request_id="left")
    assert len(first.token_ids) == 60
    assert (again.token_ids, again.text) == (first.token_ids, first.text)
