"""vLLM's routes of the tokenizer, and SageMaker's, over the wire, with a scripted scheduler."""

from typing import Any

import pytest

from gateway_harness import Harness, encoded
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from tiny_model import CHAT_TEMPLATE, CONTEXT_LENGTH, EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "hello world"}]
HELLO = encoded("hello world")


async def post(quire: Harness, path: str, body: dict[str, Any]) -> Any:
    response = await quire.http.post(path, json=body)
    return response.json() if response.status_code == 200 else response.json()["error"] | {"at": response.status_code}


async def test_a_text_there_and_back(shared: Harness) -> None:
    tokens = await post(shared, "/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert tokens == {
        "count": 2,
        "max_model_len": CONTEXT_LENGTH,
        "tokens": HELLO,
        "token_strs": ["hello", "Ġworld"],
    }
    assert await post(shared, "/detokenize", {"tokens": HELLO}) == {"prompt": "hello world"}
    assert not shared.scheduler.all("submit")


async def test_an_empty_text_has_no_tokens_over_either_protocol(shared: Harness) -> None:
    assert (await post(shared, "/tokenize", {"prompt": ""}))["tokens"] == []
    assert not (await shared.stub.Tokenize(api.TokenizeRequest(text=""))).token_ids


async def test_a_chat_has_the_tokens_of_its_prompt(shared: Harness) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    tokens = await post(shared, "/tokenize", body)
    shared.scheduler.script = answer_with(HELLO[:1])
    await post(shared, "/v1/chat/completions", body)
    assert tokens["tokens"] == list(shared.scheduler.all("submit")[0].prompt_token_ids)
    assert tokens["token_strs"] is None
    without = await post(shared, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert without["tokens"] == tokens["tokens"][: without["count"]]


async def test_a_text_beyond_the_context_is_counted_one_of_many_contexts_is_not(shared: Harness) -> None:
    assert (await post(shared, "/tokenize", {"prompt": "a" * 1_000}))["count"] == 1_000
    for path, body, field in (
        ("/tokenize", {"prompt": "a" * 16_000}, "prompt"),
        ("/tokenize", {"prompt": "a" * 1_000_000}, "prompt"),
        ("/detokenize", {"tokens": [5] * 16_000}, "tokens"),
    ):
        error = await post(shared, path, body)
        assert (error["at"], error["code"], error["param"]) == (400, "context_length_exceeded", field)


async def test_errors_name_the_field(shared: Harness) -> None:
    for path, body, field in (
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [5, 10_000]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
        ("/invocations", {"model": "tiny"}, "messages"),
    ):
        assert (await post(shared, path, body))["param"] == field


async def test_the_tokenizers_configuration(shared: Harness) -> None:
    info = (await shared.http.get("/tokenizer_info")).json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["bos_token"] == "<|im_start|>"


async def test_a_sagemaker_container(shared: Harness) -> None:
    shared.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    assert (await shared.http.get("/ping")).status_code == 200
    chat = await post(shared, "/invocations", {"messages": MESSAGES, "max_tokens": 5, "top_k": 3})
    assert chat["choices"][0]["message"]["content"] == "hello world"
    completion = await post(shared, "/invocations", {"prompt": "a"})
    assert completion["choices"][0]["text"] == "hello world"
