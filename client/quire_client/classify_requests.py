"""Builds requests for classifications from Python values: pure functions, shared by both clients."""

from typing import TypedDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client.embed_requests import Inputs, assign_inputs
from quire_client.requests import Retention, TruncationSide
from quire_client.value_options import assign_options


class ClassifyOptions(TypedDict, total=False):
    """Keyword arguments of `classify`. None is the same as absent; the server checks ranges."""

    model: str | None
    """A name or an alias from `models()`. Absent: the first model of the gateway."""
    truncate_prompt_tokens: int | None
    """Keep this many tokens of each input; -1: as many as fit. Absent: an input that is too long is refused."""
    truncation_side: TruncationSide | None
    """Where that takes tokens away. Absent: at the right, so that the first tokens are kept."""
    add_special_tokens: bool | None
    """Whether the tokenizer adds its special tokens to texts. Absent: True."""
    raw_scores: bool | None
    """Return the output of the model's head without its activation function. Absent: False."""
    priority: int | None
    """Requests of a higher priority run first. Absent: 0."""
    retention: Retention | None
    """How long Redis keeps the records of the inputs. Absent: there are none."""
    timeout: float | None
    """Deadline in seconds. Absent: the client's."""
    traceparent: str | None
    """The W3C trace that the call belongs to."""


def classify_request(inputs: Inputs, options: ClassifyOptions) -> pb.ClassifyRequest:
    """A request to classify. Raises as requests.completion_request."""
    request = pb.ClassifyRequest()
    assign_options(request, options, ClassifyOptions.__annotations__)
    assign_inputs(request, inputs)
    return request
