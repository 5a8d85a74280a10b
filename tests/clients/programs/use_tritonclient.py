"""The tritonclient package: inference over gRPC with tensors, streams, metadata, and errors."""

import json
import os
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from checks import MODEL, check, error_of, run

ADDRESS = os.environ["QUIRE_GRPC"]
PROMPT = "A quire is"
GREEDY = {"temperature": 0, "max_tokens": 8}

TYPES: dict[str, Any] = {"BYTES": np.object_, "BOOL": bool, "INT32": np.int32, "FP32": np.float32}

client = triton.InferenceServerClient(ADDRESS)


def tensor(name: str, datatype: str, value: Any) -> Any:
    """An input of one element."""
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=TYPES[datatype]))
    return made


def asking(prompt: str = PROMPT, **fields: Any) -> list[Any]:
    """The inputs of a request, with sampling as Triton's backend for vLLM takes it."""
    sampling = json.dumps(GREEDY | fields)
    return [tensor("text_input", "BYTES", prompt), tensor("sampling_parameters", "BYTES", sampling)]


def text_of(result: Any, name: str = "text_output") -> str:
    """The only text of an output."""
    (text,) = result.as_numpy(name)
    return bytes(text).decode()


@check
def the_server_is_live_and_ready() -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("another")


@check
def metadata_describes_the_tensors() -> None:
    assert client.get_server_metadata().name == "quire"
    metadata = client.get_model_metadata(MODEL, as_json=True)
    assert metadata["name"] == MODEL
    assert {"name": "text_input", "datatype": "BYTES", "shape": ["1"]} in metadata["inputs"]


@check
def infer_returns_text() -> None:
    result = client.infer(MODEL, asking(), request_id="1")
    assert result.get_response().id == "1"
    assert text_of(result)
    assert text_of(result, "finish_reason") == "length"


@check
def the_same_request_has_the_same_answer_whichever_way_its_fields_come() -> None:
    expected = text_of(client.infer(MODEL, asking()))
    text = tensor("text_input", "BYTES", PROMPT)
    inputs = [text, tensor("temperature", "FP32", 0), tensor("max_tokens", "INT32", 8)]
    assert text_of(client.infer(MODEL, inputs)) == expected
    assert text_of(client.infer(MODEL, [text], parameters={"temperature": "0", "max_tokens": 8})) == expected


@check
def outputs_are_those_that_are_requested() -> None:
    outputs = [triton.InferRequestedOutput("num_output_tokens"), triton.InferRequestedOutput("text_output")]
    result = client.infer(MODEL, asking(), outputs=outputs)
    assert result.as_numpy("num_output_tokens").tolist() == [8]
    assert result.as_numpy("finish_reason") is None


@check
def requests_of_a_stream_interleave() -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    whole = {name: text_of(client.infer(MODEL, asking(name))) for name in ("One", "Two")}
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for name in whole:
        inputs = [*asking(name), tensor("stream", "BOOL", True)]
        client.async_stream_infer(MODEL, inputs, request_id=name, enable_empty_final_response=True)
    texts, num_open = dict.fromkeys(whole, ""), len(whole)
    while num_open:
        result, error = answers.get(timeout=600)
        assert error is None, error
        response = result.get_response()
        texts[response.id] += text_of(result)
        num_open -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    assert texts == whole


@check
async def an_asynchronous_stream_has_the_same_text() -> None:
    async with triton_aio.InferenceServerClient(ADDRESS) as asynchronous:
        whole = text_of(await asynchronous.infer(MODEL, asking()))

        async def requests() -> Any:
            yield {"model_name": MODEL, "inputs": [*asking(), tensor("stream", "BOOL", True)]}

        texts = []
        async for result, error in asynchronous.stream_infer(requests()):
            assert error is None, error
            texts.append(text_of(result))
    assert "".join(texts) == whole
    assert len(texts) > 1


@check
def an_error_names_the_field() -> None:
    error = error_of(InferenceServerException, lambda: client.infer(MODEL, asking(temperature=9)))
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert error.message() == "temperature: must be between 0 and 2"
    error = error_of(InferenceServerException, lambda: client.infer("another", asking()))
    assert error.status() == "StatusCode.NOT_FOUND"


run()
