"""Sets the options of calls for embeddings, classifications and scores, shared by all three kinds of requests."""

from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any, Literal

from quire.inference.v1 import inference_pb2 as pb
from quire_client.fields import assign
from quire_client.requests import no_option, retention, truncation_side

Pooling = Literal["mean", "cls", "last"]

_POOLINGS: dict[Pooling, pb.Pooling] = {
    "mean": pb.POOLING_MEAN,
    "cls": pb.POOLING_CLS,
    "last": pb.POOLING_LAST,
}


def assign_options(
    request: pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest, options: Mapping[str, Any], known: Collection[str]
) -> None:
    """Sets those of the known options that are fields of the request. Raises as requests.completion_request."""
    for name, value in options.items():
        if name in ("timeout", "traceparent"):
            continue
        if name not in known:
            raise no_option(name, known)
        if value is None:
            continue
        if name == "pooling":
            value = _pooling(value)
        elif name == "truncation_side":
            value = truncation_side(value)
        elif name == "retention":
            if not isinstance(value, Integral):
                retention(request.retention, value)
                continue
            name = "retention.seconds"
        assign(request, name, value)


def _pooling(value: Any) -> pb.Pooling:
    if not isinstance(value, str) or value not in _POOLINGS:
        raise TypeError(f'pooling is "mean", "cls" or "last", not {value!r}')
    return _POOLINGS[value]
