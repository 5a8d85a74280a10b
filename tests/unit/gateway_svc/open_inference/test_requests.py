"""Any request of the Open Inference Protocol is read, or rejected with an error that can be sent."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.open_inference.requests import INPUTS, InferRequest
from quire.open_inference.v2 import open_inference_pb2 as pb
from svc_common.errors import QuireError

NAMES = st.sampled_from([*INPUTS, "temperature", "stop", "n", "logit_bias", "guided_json", "model", ""]) | st.text()
DATATYPES = st.sampled_from(["BYTES", "BOOL", "INT32", "UINT64", "FP16", "FP32", "FP64", "BF16", ""])
JSON = st.sampled_from([b"{}", b'{"n": 2}', b'{"stop": "\\ud800"}', b'{"n": NaN}', b"[" * 10_000, b'{"a": 1, "a": 1}'])
CONTENTS = st.builds(
    pb.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=2),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
    uint64_contents=st.lists(st.integers(0, 2**64 - 1), max_size=2),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    bytes_contents=st.lists(JSON | st.binary(), max_size=2),
)
INPUT = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=DATATYPES,
    shape=st.lists(st.integers(-1, 2) | st.just(2**62), max_size=3),
    contents=CONTENTS,
)
PARAMETER = st.one_of(
    st.builds(pb.InferParameter),
    st.builds(pb.InferParameter, bool_param=st.booleans()),
    st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(pb.InferParameter, double_param=st.floats()),
    st.builds(pb.InferParameter, string_param=st.text() | st.sampled_from(["1", "0.5", "true", "1e999", "[" * 10_000])),
)
REQUEST = st.builds(
    pb.ModelInferRequest,
    model_name=st.text(max_size=3),
    model_version=st.sampled_from(["", "1", "2"]),
    inputs=st.lists(INPUT, max_size=4),
    raw_input_contents=st.lists(st.binary(max_size=9), max_size=4) | st.just([]),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=NAMES), max_size=1),
    parameters=st.dictionaries(NAMES, PARAMETER, max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(REQUEST, st.text())
def test_any_request_is_read_or_rejected(request: pb.ModelInferRequest, text: str) -> None:
    if not request.raw_input_contents:
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    try:
        read = InferRequest.from_proto(request)
    except QuireError as error:
        error.details()
    else:
        assert read.outputs
        assert read.prompt.field_path("stopping.max_tokens") == "max_tokens"


def test_a_shape_of_many_large_sizes_is_refused_at_once() -> None:
    """Their product takes 10 s; no stream of the gateway gets a token meanwhile."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[2**62] * 40_000)
    start = time.process_time()
    with pytest.raises(QuireError, match="must be of one element") as raised:
        InferRequest.from_proto(request)
    assert raised.value.field == "inputs[0].shape"
    assert time.process_time() - start < 1
