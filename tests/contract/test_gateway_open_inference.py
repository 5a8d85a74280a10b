"""The Open Inference Protocol of KServe, with Triton's stream, over the same validator as the other protocols."""

import asyncio
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from gateway_harness import MODEL, Harness, encoded, reason_of, rest_of, running_gateway
from quire.open_inference.v2 import open_inference_pb2 as pb
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with
from tiny_model import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def quire(shared: Harness) -> Harness:
    shared.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    return shared


def stub_of(quire: Harness) -> Any:
    return GRPCInferenceServiceStub(quire.channel)


def raw(value: Any, datatype: str) -> bytes:
    """A raw tensor of one element."""
    if datatype == "BYTES":
        data = str(value).encode()
        return struct.pack("<I", len(data)) + data
    return struct.pack({"BOOL": "<?", "INT32": "<i", "INT64": "<q", "FP32": "<f", "FP64": "<d"}[datatype], value)


def asking(*inputs: tuple[str, str, Any], outputs: Sequence[str] = (), **fields: Any) -> pb.ModelInferRequest:
    """A request with these inputs: name, type and value."""
    request = pb.ModelInferRequest(**({"model_name": MODEL, "id": "7"} | fields))
    for name, datatype, value in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(raw(value, datatype))
    for name in outputs:
        request.outputs.add(name=name)
    return request


TEXT = ("text_input", "BYTES", "hello")
STREAM = ("stream", "BOOL", True)


def texts(response: pb.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The texts of an output."""
    (index,) = [index for index, output in enumerate(response.outputs) if output.name == name]
    data, found = response.raw_output_contents[index], []
    while data:
        end = 4 + struct.unpack_from("<I", data)[0]
        found.append(data[4:end].decode())
        data = data[end:]
    assert [len(found)] == response.outputs[index].shape
    return found


def parameter(value: Any) -> pb.InferParameter:
    kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
    return pb.InferParameter(**{kind: value})


async def test_a_server_and_its_model_describe_themselves(quire: Harness) -> None:
    stub = stub_of(quire)
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="2"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="another"))).ready
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "quire"
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert (metadata.name, metadata.versions) == (MODEL, ["1"])
    assert ("text_input", "BYTES", [1]) in [(one.name, one.datatype, one.shape) for one in metadata.inputs]
    assert ("text_output", "BYTES", [-1]) in [(one.name, one.datatype, one.shape) for one in metadata.outputs]


async def test_text_is_generated(quire: Harness) -> None:
    response = await stub_of(quire).ModelInfer(asking(TEXT))
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "7")
    assert [output.name for output in response.outputs] == ["text_output", "finish_reason"]
    assert (texts(response), texts(response, "finish_reason")) == (["hello world"], ["stop"])


async def test_contents_of_a_tensor_are_read_like_raw_ones(quire: Harness) -> None:
    request = pb.ModelInferRequest()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"hello")
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1]).contents.int_contents.append(1)
    assert texts(await stub_of(quire).ModelInfer(request)) == ["hello"]


@pytest.mark.parametrize("way", ["inputs", "parameters", "sampling_parameters", "as text"])
async def test_sampling_may_be_inputs_parameters_or_json(way: str, quire: Harness) -> None:
    fields = {"temperature": 0.5, "top_k": 3, "max_tokens": 5, "seed": 9, "ignore_eos": True}
    match way:
        case "inputs":
            kinds = {float: "FP32", int: "INT64", bool: "BOOL"}
            request = asking(TEXT, *((name, kinds[type(value)], value) for name, value in fields.items()))
        case "parameters":
            request = asking(TEXT, parameters={name: parameter(value) for name, value in fields.items()})
        case "sampling_parameters":
            request = asking(TEXT, ("sampling_parameters", "BYTES", json.dumps(fields)))
        case _:
            request = asking(TEXT, parameters={name: parameter(str(value)) for name, value in fields.items()})
    await stub_of(quire).ModelInfer(request)
    submit = await quire.scheduler.next("submit")
    assert isinstance(submit, scheduler_v1.Submit)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, submit.max_tokens) == (0.5, 3, 9, 5)
    assert EOS not in submit.stop_token_ids


async def test_outputs_are_those_that_are_requested(quire: Harness) -> None:
    stub = stub_of(quire)
    response = await stub.ModelInfer(asking(TEXT, outputs=["num_output_tokens", "num_input_tokens"]))
    assert [output.name for output in response.outputs] == ["num_input_tokens", "num_output_tokens"]
    assert list(response.raw_output_contents) == [struct.pack("<I", 1), struct.pack("<I", 3)]
    response = await stub.ModelInfer(asking(TEXT, ("return_num_output_tokens", "BOOL", True)))
    assert [output.name for output in response.outputs] == ["text_output", "finish_reason", "num_output_tokens"]
    response = await stub.ModelInfer(asking(TEXT, ("exclude_input_in_output", "BOOL", False)))
    assert texts(response) == ["hellohello world"]


async def test_several_sequences_are_one_tensor(quire: Harness) -> None:
    response = await stub_of(quire).ModelInfer(asking(TEXT, parameters={"n": parameter(2)}))
    assert texts(response) == ["hello world"] * 2


async def test_a_stream_sends_text_as_it_comes(quire: Harness) -> None:
    call = stub_of(quire).ModelStreamInfer()
    await call.write(asking(TEXT, STREAM, id="a"))
    await call.write(asking(TEXT, id="b"))
    await call.done_writing()
    by_id: dict[str, list[pb.ModelInferResponse]] = {"a": [], "b": []}
    for message in await rest_of(call):
        assert message.error_message == ""
        by_id[message.infer_response.id].append(message.infer_response)
    assert "".join(text for response in by_id["a"] for text in texts(response)) == "hello world"
    assert [texts(response) for response in by_id["b"]] == [["hello world"]]
    for responses in by_id.values():
        finals = [response.parameters["triton_final_response"].bool_param for response in responses]
        assert finals == [False] * (len(finals) - 1) + [True]


async def test_an_error_within_a_stream_has_its_reason_and_when_to_try_again(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why", Duration(seconds=7))
    call = stub_of(quire).ModelStreamInfer()
    await call.write(asking(TEXT))
    message = await call.read()
    assert message.error_message == "why"
    parameters = message.infer_response.parameters
    assert parameters["error_reason"].string_param == "TENANT_QUOTA_EXCEEDED"
    assert parameters["retry_after"].double_param == 7
    call.cancel()


async def test_a_request_that_fails_does_not_end_its_stream(quire: Harness) -> None:
    call = stub_of(quire).ModelStreamInfer()
    await call.write(asking(TEXT, id="bad", parameters={"temperature": parameter(9.0)}))
    message = await call.read()
    assert message.error_message == "temperature: must be between 0 and 2"
    assert message.infer_response.id == "bad"
    parameters = message.infer_response.parameters
    assert parameters["triton_final_response"].bool_param
    assert (parameters["error_reason"].string_param, "retry_after" in parameters) == ("INVALID_FIELD", False)
    await call.write(asking(TEXT, id="good"))
    assert texts((await call.read()).infer_response) == ["hello world"]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_requests_of_a_stream_end_with_it(quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    call = stub_of(quire).ModelStreamInfer()
    for request_id in ("a", "b"):
        await call.write(asking(TEXT, STREAM, id=request_id))
    keys = {(await quire.scheduler.next("submit")).key for _ in range(2)}
    call.cancel()
    assert {(await quire.scheduler.next("cancel")).key for _ in range(2)} == keys


BAD: dict[str, tuple[pb.ModelInferRequest, str]] = {
    "no text": (asking(), "text_input"),
    "text of another type": (asking(("text_input", "INT32", 1)), "text_input"),
    "a stream": (asking(TEXT, STREAM), "stream"),
    "a field out of range": (asking(TEXT, parameters={"top_p": parameter(2.0)}), "top_p"),
    "a field of another type": (asking(TEXT, parameters={"top_k": parameter("many")}), "top_k"),
    "not a number": (asking(TEXT, ("temperature", "FP32", float("nan"))), "temperature"),
    "a field twice": (asking(TEXT, ("n", "INT32", 1), parameters={"n": parameter(1)}), "n"),
    "an unknown field": (asking(TEXT, parameters={"temprature": parameter(1.0)}), "temprature"),
    "an unknown field of JSON": (asking(TEXT, ("sampling_parameters", "BYTES", '{"x": 1}')), "x"),
    "a prompt that is too long": (asking(("text_input", "BYTES", "hello" * 999)), "text_input"),
    "a parameter of Triton's": (asking(TEXT, parameters={"sequence_id": parameter(1)}), "parameters.sequence_id"),
    "an unknown output": (asking(TEXT, outputs=["logits"]), "outputs[0].name"),
    "another version": (asking(TEXT, model_version="2"), "model_version"),
    "another model": (asking(TEXT, model_name="another"), "model_name"),
    "a number of brackets": (asking(TEXT, parameters={"top_k": parameter("[" * 10**5)}), "top_k"),
    "logprobs": (asking(TEXT, parameters={"logprobs": parameter(1)}), "logprobs"),
    "a stream by parameter": (asking(TEXT, parameters={"stream": parameter(True)}), "stream"),
    "raw tensors for some": (asking(TEXT, raw_input_contents=[b"\0"]), "raw_input_contents"),
    "a large tensor": (pb.ModelInferRequest(inputs=[{"datatype": "BYTES", "shape": [2]}]), "inputs[0].shape"),
    "another datatype": (pb.ModelInferRequest(inputs=[{"datatype": "BF16", "shape": [1]}]), "inputs[0].datatype"),
    "a tensor without a value": (
        pb.ModelInferRequest(inputs=[{"datatype": "BOOL"}]),
        "inputs[0].contents.bool_contents",
    ),
    "not UTF-8": (
        pb.ModelInferRequest(inputs=[{"datatype": "BYTES"}], raw_input_contents=[b"\1\0\0\0\xff"]),
        "raw_input_contents[0]",
    ),
    "many inputs": (pb.ModelInferRequest(inputs=[{}] * 129), "inputs"),
    "many parameters": (asking(TEXT, parameters={str(i): parameter(1) for i in range(129)}), "parameters"),
    "a long id": (asking(TEXT, id="a" * 1025), "id"),
    "long JSON": (asking(TEXT, ("sampling_parameters", "BYTES", " " * 2**19)), "sampling_parameters"),
    "no JSON": (asking(TEXT, ("sampling_parameters", "BYTES", "{")), "sampling_parameters"),
    "JSON that is no object": (asking(TEXT, ("sampling_parameters", "BYTES", "[1]")), "sampling_parameters"),
    "an input without a name": (asking(TEXT, ("", "INT32", 1)), "inputs"),
    "a parameter without a name": (asking(TEXT, parameters={"": parameter(1)}), "parameters"),
    "JSON without a name": (asking(TEXT, ("sampling_parameters", "BYTES", '{"": 1}')), "sampling_parameters"),
    "an empty parameter": (asking(TEXT, parameters={"n": pb.InferParameter()}), "parameters.n"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_an_error_names_the_field_at_fault(bad: str, quire: Harness) -> None:
    request, field = BAD[bad]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(quire).ModelInfer(request)
    assert reason_of(raised.value)[1] == field


async def test_calls_need_a_key_except_those_of_probes(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\n')
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        stub = stub_of(quire)
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        calls = {
            "ModelReady": pb.ModelReadyRequest(name=MODEL),
            "ServerMetadata": pb.ServerMetadataRequest(),
            "ModelMetadata": pb.ModelMetadataRequest(name=MODEL),
            "ModelInfer": asking(TEXT),
        }
        for method, request in calls.items():
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await getattr(stub, method)(request)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rest_of(stub.ModelStreamInfer(iter([asking(TEXT)])))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer the-own-key-of-alice"),)
        assert texts(await stub.ModelInfer(asking(TEXT), metadata=metadata)) == ["hello world"]
        streamed = stub.ModelStreamInfer(iter([asking(TEXT)]), metadata=metadata)
        assert texts((await streamed.read()).infer_response) == ["hello world"]


async def test_a_message_that_does_not_parse_ends_the_stream(quire: Harness) -> None:
    channel: Any = quire.channel
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await call.write(b"\xff" * 9)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(60):
            await call.read()
    assert reason_of(raised.value)[0] == "MALFORMED_MESSAGE"


async def test_a_stream_ends_with_its_status_although_a_response_is_just_written(quire: Harness) -> None:
    channel: Any = quire.channel
    messages = [asking(model_name="other").SerializeToString(), b"\xff"]
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter(messages), timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest_of(call)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
