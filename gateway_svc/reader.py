"""The interface of a reader of a request's events, and the actions that it returns.

A reader holds no reference to its subscription, which carries the actions out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True)
class StopFound:
    """A stop string was found: sequence `index` ends after `num_tokens` tokens."""

    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The first `num_tokens` tokens of sequence `index` were searched for stop strings."""

    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Release:
    """The reader takes no more events. `on_disconnect` is None where it has the whole request."""

    on_disconnect: OnDisconnect | None


ReaderAction: TypeAlias = StopFound | Acknowledgement | Release


class Reader(Protocol):
    """One call's reader of a request. No method waits."""

    def field_path(self, which: str, item_index: int | None = None) -> str:
        """A field as the reader's client spells it."""

    def on_accepted(self, is_durable: bool) -> None:
        """The scheduler has queued the request."""

    def on_attached(self, attached: scheduler_pb2.Attached, *, is_durable: bool) -> Sequence[ReaderAction]:
        """The request exists, and `attached` is its output so far. Called again for each new scheduler."""

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> Sequence[ReaderAction]:
        """A sequence has new tokens."""

    def on_prompt_logprobs(self, prompt_logprobs: scheduler_pb2.PromptLogprobs) -> None:
        """More tokens of the prompt have log-probabilities. All of them come before the first token of sequence 0."""

    def on_failed(self, error: QuireError) -> None:
        """The request has failed for this reader. Nothing follows."""

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.UnflushedTokens]:
        """The reader's tokens of each sequence from its offset on; a sequence without an offset, from the beginning."""
