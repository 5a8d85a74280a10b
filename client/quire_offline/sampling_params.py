"""Sampling parameters by vLLM's names, which are the fields of the HTTP API."""

from collections.abc import Mapping, Sequence
from enum import Enum
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

_OF_PYTHON: Mapping[str, Sequence[Any]] = {
    "detokenize": (True,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": (),
    "skip_clone": (False, True),  # of the parameters themselves, which are never changed
    "skip_reading_prefix_cache": (False,),
    "trace_decode_token_ids": (),
}
"""Parameters of vLLM's class that no body has, with the values that ask for nothing."""

_OUTPUT_KIND = "output_kind"


class RequestOutputKind(Enum):
    """Which outputs an `AsyncLLM` yields, as in vLLM."""

    CUMULATIVE = 0
    """Each has all text and tokens so far."""
    DELTA = 1
    """Each has what is new since the one before it."""
    FINAL_ONLY = 2
    """There is only the last one, with everything."""


class SamplingParams(Parameters):
    """How outputs are made, as in the body of /v1/completions: docs/api.md has each field with its range and default.

    An absent parameter, or one that is None, has the server's default: that of the model's generation_config.json, else
    of the API; `max_tokens` is 16 where neither says more, and in chats the rest of the context. `output_kind` is a
    RequestOutputKind, CUMULATIVE where it is absent; an `LLM` returns whole outputs with any.
    """

    __slots__ = ()

    names: ClassVar = CompletionBody.served_fields() - _OF_REQUESTS | _OF_CHATS | {_OUTPUT_KIND}
    not_served: ClassVar = {
        name: neutral
        for name, neutral in {**CompletionBody.unserved, **_OF_PYTHON, "stream_interval": (1,)}.items()
        if name not in _OF_CHATS
    }
    instead: ClassVar = {"guided_decoding": "structured_outputs"}

    @property
    def values(self) -> Mapping[str, Any]:
        return {name: value for name, value in self._values.items() if name != _OUTPUT_KIND}

    @property
    def kind(self) -> RequestOutputKind:
        """The `output_kind`. Raises TypeError where it is none."""
        kind = self._values.get(_OUTPUT_KIND, RequestOutputKind.CUMULATIVE)
        if not isinstance(kind, RequestOutputKind):
            raise TypeError(f"{_OUTPUT_KIND}: must be a RequestOutputKind, not {type(kind).__name__}")
        return kind


class StructuredOutputsParams(dict[str, Any]):
    """What outputs must match, for `SamplingParams(structured_outputs=…)`: one of json, json_object, regex, choice and
    grammar."""
