"""Sampling parameters by vLLM's names, which are the fields of the HTTP API."""

from collections.abc import Mapping
from typing import Any

from gateway_svc.http_api.openai.generation_body import CompletionBody
from quire_client.requests import no_option

# Of a body, and not of how its output is made; those of a call are arguments of the call.
_OF_REQUESTS = {
    "echo",
    "model",
    "priority",
    "prompt",
    "retention",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "service_tier",
    "stream",
    "stream_options",
}
NAMES = CompletionBody.served_fields() - _OF_REQUESTS
"""The parameters that there are."""


class SamplingParams:
    """How outputs are made, as in the body of /v1/completions: docs/api.md has each field with its range and default.

    An absent parameter, or one that is None, has the server's default: that of the model's generation_config.json, else
    of the API; `max_tokens` is 16 where neither says more, and in chats the rest of the context. Values are checked
    when they are used. Raises TypeError for a name that does not exist.
    """

    __slots__ = ("_values",)

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in NAMES:
                raise no_option(name, sorted(NAMES))
        self._values = {name: _plain(value) for name, value in values.items() if value is not None}

    @property
    def values(self) -> Mapping[str, Any]:
        """Those that were given, as a body has them."""
        return self._values

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return self._values.get(name)
        raise AttributeError(f"SamplingParams has no parameter {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]  # values may be lists

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


class StructuredOutputsParams(dict[str, Any]):
    """What outputs must match, for `SamplingParams(structured_outputs=…)`: one of json, json_object, regex, choice and
    grammar."""


def _plain(value: Any) -> Any:
    """A value as JSON has it: tuples are lists, names of objects are text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
