"""Builds requests for embeddings from Python values: pure functions, shared by both clients."""

from collections.abc import Mapping, Sequence, Sized
from numbers import Integral
from typing import TypedDict, cast

from quire.inference.v1 import inference_pb2 as pb
from quire_client.fields import assign
from quire_client.requests import Prompt, Retention, TruncationSide, check_prompt
from quire_client.value_options import Pooling, assign_options

Inputs = Prompt | Sequence[Prompt]
"""What to embed or to classify: one prompt, or several."""


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `embed`. None is the same as absent; the server checks ranges."""

    model: str | None
    """A name or an alias from `models()`. Absent: the first model of the gateway."""
    dimensions: int | None
    """How many numbers of each vector are returned, from the first on. Absent: all."""
    pooling: Pooling | None
    """How the hidden states of an input's tokens become one vector. Absent: as the model's files say."""
    normalize: bool | None
    """Whether vectors are divided by their lengths. Absent: as the model's files say."""
    truncate_prompt_tokens: int | None
    """Keep this many tokens of each input; -1: as many as fit. Absent: an input that is too long is refused."""
    truncation_side: TruncationSide | None
    """Where that takes tokens away. Absent: at the right, so that the first tokens are kept."""
    add_special_tokens: bool | None
    """Whether the tokenizer adds its special tokens to texts. Absent: True."""
    priority: int | None
    """Requests of a higher priority run first. Absent: 0."""
    retention: Retention | None
    """How long Redis keeps the records of the inputs. Absent: there are none."""
    timeout: float | None
    """Deadline in seconds. Absent: the client's."""
    traceparent: str | None
    """The W3C trace that the call belongs to."""


def embed_request(inputs: Inputs, options: EmbedOptions) -> pb.EmbedRequest:
    """A request to embed. Raises as requests.completion_request."""
    request = pb.EmbedRequest()
    assign_options(request, options, EmbedOptions.__annotations__)
    assign_inputs(request, inputs)
    return request


def assign_inputs(request: pb.EmbedRequest | pb.ClassifyRequest, inputs: Inputs) -> None:
    """Sets the inputs of a request. Raises as requests.completion_request."""
    for number, one in enumerate(_several(inputs)):
        check_prompt(one, f"inputs[{number}]")
        given = request.inputs.add()
        if isinstance(one, str):
            assign(given, "text", one, within=f"inputs[{number}].")
        else:
            given.token_ids.SetInParent()
            assign(given, "token_ids.ids", one, within=f"inputs[{number}].")


def _several(inputs: Inputs) -> Sequence[Prompt]:
    """The prompts of a call; a text, or token ids, are one. Raises TypeError."""
    if not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__") or isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a text, token ids or a list of these, not {type(inputs).__name__}")
    is_one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], Integral))
    return [cast(Prompt, inputs)] if is_one else cast(Sequence[Prompt], inputs)
