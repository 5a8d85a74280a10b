"""Tensors of the Open Inference Protocol, as far as text and its options need them: those of one element, and texts."""

import struct
from collections.abc import Sequence
from typing import TypeAlias

from quire.open_inference.v2 import open_inference_pb2 as pb
from svc_common.errors import QuireError, Reason

Scalar: TypeAlias = bool | int | float | str

BYTES = "BYTES"
UINT32 = "UINT32"

_LENGTH = struct.Struct("<I")
"""Precedes each element of a raw tensor of BYTES."""
_RAW = {
    "BOOL": struct.Struct("<?"),
    "INT8": struct.Struct("<b"),
    "INT16": struct.Struct("<h"),
    "INT32": struct.Struct("<i"),
    "INT64": struct.Struct("<q"),
    "UINT8": struct.Struct("<B"),
    "UINT16": struct.Struct("<H"),
    UINT32: struct.Struct("<I"),
    "UINT64": struct.Struct("<Q"),
    "FP16": struct.Struct("<e"),
    "FP32": struct.Struct("<f"),
    "FP64": struct.Struct("<d"),
}
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    UINT32: "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Scalar]:
    """The value of each input by its name. Raises QuireError for an input that does not have one value of its type."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise _invalid("raw_input_contents", "must have one item for each of the inputs, or none")
    values: dict[str, Scalar] = {}
    for item_index, tensor in enumerate(request.inputs):
        where = f"inputs[{item_index}]"
        if tensor.datatype not in (BYTES, *_RAW):
            raise _invalid(f"{where}.datatype", f"must be {BYTES} or one of {', '.join(_RAW)}")
        if any(size != 1 for size in tensor.shape):  # not their product: large numbers take long to multiply
            raise _invalid(f"{where}.shape", "must be of one element")
        if tensor.name in values:
            raise _invalid(f"{where}.name", "is there twice")
        if raw:
            values[tensor.name] = _from_raw(tensor.datatype, raw[item_index], f"raw_input_contents[{item_index}]")
        else:
            values[tensor.name] = _from_contents(tensor, f"{where}.contents")
    return values


def read_parameter(parameter: pb.InferParameter, where: str) -> Scalar:
    """A parameter's value. Raises QuireError where it has none."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise _invalid(where, "must have a value")
    value: Scalar = getattr(parameter, kind)
    return value


def add_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str]) -> None:
    """Adds a tensor of texts to a response."""
    _add(response, name, BYTES, len(texts))
    encoded = [text.encode() for text in texts]
    response.raw_output_contents.append(b"".join(_LENGTH.pack(len(text)) + text for text in encoded))


def add_count(response: pb.ModelInferResponse, name: str, count: int) -> None:
    """Adds a tensor of one number to a response."""
    _add(response, name, UINT32, 1)
    response.raw_output_contents.append(_RAW[UINT32].pack(count))


def _add(response: pb.ModelInferResponse, name: str, datatype: str, size: int) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[size])


def _from_raw(datatype: str, data: bytes, where: str) -> Scalar:
    if datatype == BYTES:
        if len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
            raise _invalid(where, "must be the length of one text, in four bytes, and the text")
        return _text(data[_LENGTH.size :], where)
    form = _RAW[datatype]
    if len(data) != form.size:
        raise _invalid(where, f"must have {form.size} bytes, as one value of {datatype} has")
    value: Scalar = form.unpack(data)[0]
    return value


def _from_contents(tensor: pb.ModelInferRequest.InferInputTensor, where: str) -> Scalar:
    name = _CONTENTS.get(tensor.datatype)
    if name is None:
        raise _invalid(where, f"cannot have {tensor.datatype}, which only raw_input_contents can")
    values = getattr(tensor.contents, name)
    if len(values) != 1:
        raise _invalid(f"{where}.{name}", "must have one value")
    return _text(values[0], where) if tensor.datatype == BYTES else values[0]


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _invalid(where, "is not UTF-8") from None


def _invalid(where: str, message: str) -> QuireError:
    return QuireError(Reason.INVALID_FIELD, message, field=where)
