"""A request of the Open Inference Protocol, as a body of /v1/completions: the same fields, and the same validator."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gateway_svc.field_paths import Field
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import JsonBody, invalid, parse_body, printable
from gateway_svc.http_api.openai.bodies import BodyFieldPath, read_completion
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.open_inference.tensors import BYTES, UINT32, Scalar, read_inputs, read_parameter
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.unvalidated_request import ResponseMode
from quire.open_inference.v2 import open_inference_pb2 as pb
from svc_common.errors import QuireError, Reason

VERSION = "1"

TEXT_INPUT = "text_input"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"


class Output(Enum):
    """Tensors of a response, by their names."""

    TEXT = "text_output"
    FINISH_REASON = "finish_reason"
    INPUT_TOKENS = "num_input_tokens"
    OUTPUT_TOKENS = "num_output_tokens"


INPUTS: Mapping[str, str] = {
    TEXT_INPUT: BYTES,
    STREAM: "BOOL",
    SAMPLING_PARAMETERS: BYTES,
    EXCLUDE_INPUT: "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""The tensors of a request with their types. Any field of /v1/completions may be one, too."""
OUTPUTS: Mapping[Output, str] = {
    Output.TEXT: BYTES,
    Output.FINISH_REASON: BYTES,
    Output.INPUT_TOKENS: UINT32,
    Output.OUTPUT_TOKENS: UINT32,
}

_RETURNS = {
    "return_finish_reason": Output.FINISH_REASON,
    "return_num_input_tokens": Output.INPUT_TOKENS,
    "return_num_output_tokens": Output.OUTPUT_TOKENS,
}
_OWN = {
    *("model", "prompt", "stream_options", "echo"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"),
}
"""Fields of the body that a request has in its own way, or that its answer has no tensor for."""
_UNSERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
"""Parameters that Triton gives a meaning of its own."""
_NUMBERS = {
    *(one.name for one in SAMPLING_FIELDS),
    *("max_tokens", "min_tokens", "n", "best_of", "seed", "length_penalty"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search"),
}
"""Fields that clients of Triton's backend for vLLM write as text, such as "0.1"."""
# Both are read on the event loop: a message of the largest size would delay all streams.
_MAX_VALUES = 128
_MAX_SAMPLING_CHARS = 2**18
_MAX_ID_CHARS = 1024  # each response of a stream has the id
_NAMES: Mapping[str, str] = {
    Field.MODEL: "model_name",
    Field.PROMPT: TEXT_INPUT,
    Field.TEXT: TEXT_INPUT,
    Field.REQUEST_ID: "id",
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a request asks for. `id` is returned. `prefix` is what its text begins with: the prompt, where that is to be
    returned."""

    id: str
    prompt: PromptRequest
    response_mode: ResponseMode
    outputs: frozenset[Output]
    prefix: str = ""

    @classmethod
    def from_proto(cls, request: pb.ModelInferRequest) -> "InferRequest":
        """Raises QuireError, which names the input, the parameter or the field at fault."""
        check_version(request.model_version, "model_version")
        if len(request.id) > _MAX_ID_CHARS:
            raise invalid("id", f"must have at most {_MAX_ID_CHARS} characters")
        if len(request.inputs) > _MAX_VALUES:
            raise invalid("inputs", f"must be at most {_MAX_VALUES}")
        inputs = read_inputs(request)
        text = inputs.pop(TEXT_INPUT, None)
        if not isinstance(text, str):
            raise invalid(TEXT_INPUT, f"must be an input of the type {BYTES}")
        streams = _flag(inputs, STREAM) or _flag(inputs, "streaming") or False
        excludes_input = _flag(inputs, EXCLUDE_INPUT)
        if streams and excludes_input is False:
            raise invalid(EXCLUDE_INPUT, "must not be false in a stream")
        outputs = _outputs(request, inputs)
        mode = ResponseMode.STREAMED if streams else ResponseMode.WHOLE
        prompt = _prompt(request, text, inputs, mode)
        return cls(request.id, prompt, mode, outputs, text if excludes_input is False else "")


def check_version(version: str, where: str) -> None:
    """Rejects a version of a model other than the only one."""
    if version not in ("", VERSION):
        raise QuireError(Reason.MODEL_NOT_FOUND, f"models have the version {VERSION} only", field=where)


def _outputs(request: pb.ModelInferRequest, inputs: dict[str, Scalar]) -> frozenset[Output]:
    returned = {output: _flag(inputs, name) for name, output in _RETURNS.items()}
    if not request.outputs:
        defaults = {Output.TEXT: True, Output.FINISH_REASON: returned[Output.FINISH_REASON] is not False}
        return frozenset(output for output, is_returned in (returned | defaults).items() if is_returned)
    known = {output.value: output for output in Output}
    for item_index, requested in enumerate(request.outputs):
        if requested.name not in known:
            raise invalid(f"outputs[{item_index}].name", f"must be one of {', '.join(known)}")
    return frozenset(known[requested.name] for requested in request.outputs)


def _prompt(request: pb.ModelInferRequest, text: str, inputs: dict[str, Scalar], mode: ResponseMode) -> PromptRequest:
    fields: dict[str, Any] = {}
    sampling = inputs.pop(SAMPLING_PARAMETERS, "{}")
    if not isinstance(sampling, str):
        raise invalid(SAMPLING_PARAMETERS, f"must be a JSON object of the type {BYTES}")
    if len(sampling) > _MAX_SAMPLING_CHARS:
        raise invalid(SAMPLING_PARAMETERS, f"must have at most {_MAX_SAMPLING_CHARS} characters")
    if len(request.parameters) > _MAX_VALUES:
        raise invalid("parameters", f"must be at most {_MAX_VALUES}")
    body = _object(sampling)
    parameters = {
        name: read_parameter(value, f"parameters.{printable(name)}")
        for name, value in request.parameters.items()
        if not name.startswith("triton_")
    }
    for name in parameters.keys() & {*_UNSERVED}:
        raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field=f"parameters.{name}")
    sources: Mapping[str, Mapping[str, Any]] = {
        SAMPLING_PARAMETERS: body.values,
        "parameters": parameters,
        "inputs": inputs,
    }
    for where, source in sources.items():
        if "" in source:
            raise invalid(where, "must not have an empty name")
        for name, value in source.items():
            if name in _OWN:
                raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served by this protocol", field=name)
            if name in INPUTS:
                raise invalid(name, "must be an input")
            if name in fields:
                raise invalid(printable(name), "is there twice")
            fields[name] = _number(value) if name in _NUMBERS else value
    UndefinedFields.REFUSE.check(CompletionBody, fields)
    if request.model_name:
        fields["model"] = request.model_name
    fields |= {"prompt": text, STREAM: mode is ResponseMode.STREAMED}
    (read,) = read_completion(CompletionBody.read(JsonBody(fields, body.non_finite)), None).prompts
    if mode is ResponseMode.STREAMED and (read.unvalidated.n or 1) > 1:
        raise QuireError(Reason.FEATURE_UNSUPPORTED, "must be 1 in a stream", field="n")
    field_path = read.field_path
    if isinstance(field_path, BodyFieldPath):
        field_path = replace(field_path, names={**field_path.names, **_NAMES})
    return PromptRequest(read.unvalidated, field_path)


def _object(sampling: str) -> JsonBody:
    try:
        return parse_body(sampling.encode())
    except QuireError as error:
        if error.reason is not Reason.MALFORMED_MESSAGE:  # it names a field
            raise
        raise invalid(SAMPLING_PARAMETERS, "must be a JSON object") from None


def _number(value: Any) -> Any:
    """A number or truth value that is written as text; any other value as it is."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value.lower())
        except (ValueError, RecursionError):
            return value
        if isinstance(parsed, bool | int | float):
            return parsed
    return value


def _flag(inputs: dict[str, Scalar], name: str) -> bool | None:
    value = inputs.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, "must be of the type BOOL")
    return value
