"""Sampling parameters by vLLM's names, which are the fields of the HTTP API."""

from typing import Any, ClassVar

from gateway_svc.http_api.openai.generation_body import CompletionBody
from quire_offline.parameters import Parameters

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

_OF_CHATS = {"thinking_token_budget"}
"""Parameters of vLLM's class that are fields of a chat's body only."""


class SamplingParams(Parameters):
    """How outputs are made, as in the body of /v1/completions: docs/api.md has each field with its range and default.

    An absent parameter, or one that is None, has the server's default: that of the model's generation_config.json, else
    of the API; `max_tokens` is 16 where neither says more, and in chats the rest of the context.
    """

    __slots__ = ()

    names: ClassVar = CompletionBody.served_fields() - _OF_REQUESTS | _OF_CHATS
    not_served: ClassVar = frozenset(CompletionBody.unserved) - _OF_CHATS


class StructuredOutputsParams(dict[str, Any]):
    """What outputs must match, for `SamplingParams(structured_outputs=…)`: one of json, json_object, regex, choice and
    grammar."""
