"""Whole answers of many tokens are made in threads, in each protocol, and so are answers with long prompts: the streams
of others go on meanwhile.
"""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway_harness import MODEL, Harness, encoded, rest_of
from gateway_svc import output, ranking, work_costs
from gateway_svc.http_api.ollama import answers
from gateway_svc.http_api.openai.answers import ResponseBuilder
from gateway_svc.prompt_output import PromptOutput
from quire.inference.v1 import inference_pb2 as api
from quire.open_inference.v2 import open_inference_pb2 as pb
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripted_scheduler import answer_with
from tiny_model import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": False}


def post(path: str, body: dict[str, Any]) -> Callable[[Harness], Awaitable[str]]:
    async def ask(quire: Harness) -> str:
        response = await quire.http.post(path, json=body)
        assert response.status_code == 200
        return response.text

    return ask


async def generate(quire: Harness) -> str:
    return str(await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(text="a"))))


async def infer(quire: Harness) -> str:
    request = pb.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"a")
    return str(await GRPCInferenceServiceStub(quire.channel).ModelInfer(request))


CALLS = {
    "completions": post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 20}),
    "chat": post("/v1/chat/completions", CHAT),
    "messages": post("/v1/messages", {**CHAT, "max_tokens": 20}),
    "ollama": post("/api/chat", CHAT),
    "Generate": generate,
    "ModelInfer": infer,
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_long_answer_is_made_in_a_thread(name: str, shared: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def merge(chunks: Any) -> Any:
        threads.append(threading.current_thread())
        return output.merge_chunks(chunks)

    for user in (ranking, answers):
        monkeypatch.setattr(user, "merge_chunks", merge)
    shared.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    assert "hello world" in await CALLS[name](shared)
    assert set(threads) == {threading.main_thread()}, "the thread is not worth its while for a short answer"
    threads.clear()
    monkeypatch.setattr(work_costs, "MERGED_CHUNK", 10_000.0)
    assert "hello world" in await CALLS[name](shared)
    assert threads
    assert threading.main_thread() not in threads


async def generate_with_prompt(quire: Harness) -> str:
    return str(await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(text="a", echo=True))))


async def stream_with_prompt(quire: Harness) -> str:
    request = api.StreamGenerateRequest(generation=api.Generation(text="a", echo=True))
    return "".join(one.chunk.text for one in await rest_of(quire.stub.StreamGenerate(request)))


ECHO: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 20, "echo": True}
CONTINUED: dict[str, Any] = {
    "messages": [*CHAT["messages"], {"role": "assistant", "content": "b"}],
    "echo": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
}
WITH_PROMPTS = {
    "a text": post("/v1/completions", ECHO),
    "a text in a stream": post("/v1/completions", {**ECHO, "stream": True}),
    "tokens": post("/v1/completions", {**ECHO, "echo": False, "return_token_ids": True}),
    "tokens in a stream": post("/v1/chat/completions", {**CHAT, "stream": True, "return_token_ids": True}),
    "a message": post("/v1/chat/completions", CONTINUED),
    "Generate": generate_with_prompt,
    "StreamGenerate": stream_with_prompt,
}


@pytest.mark.parametrize("name", WITH_PROMPTS)
async def test_an_answer_with_a_long_prompt_is_made_in_a_thread(
    name: str, shared: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(work: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return do

    monkeypatch.setattr(PromptOutput, "of", recorded(PromptOutput.of))
    for made in ("whole", "event"):
        monkeypatch.setattr(ResponseBuilder, made, recorded(getattr(ResponseBuilder, made)))
    shared.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    await WITH_PROMPTS[name](shared)
    assert set(threads) == {threading.main_thread()}, "the thread is not worth its while for a short prompt"
    threads.clear()
    monkeypatch.setattr(work_costs, "PROMPT_TEXT_TOKEN", 10_000.0)
    await WITH_PROMPTS[name](shared)
    assert threads
    assert threading.main_thread() not in threads
