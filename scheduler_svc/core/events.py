"""What the scheduler returns to its driver: tokens, ends and failures of requests."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from scheduler_svc.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class StopToken:
    """A sequence ended with this stop token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """A sequence ended with `max_tokens` tokens."""


@dataclass(frozen=True, slots=True)
class ValueComputed:
    """A sequence ended with the value of its prompt, which is not read here."""

    value: object


End = StopToken | MaxTokens | ValueComputed


class TokensEvent(NamedTuple):
    """New tokens of a sequence, the first of which is output token number `offset`. `score` is that of a beam search.

    A sequence that ends with a value has no tokens.
    """

    sequence: Sequence
    offset: int
    token_ids: Seq[int]
    logprobs: Seq[object] = ()
    end: End | None = None
    score: float | None = None


class PromptLogprobsEvent(NamedTuple):
    """Log-probabilities of tokens of a request's prompt, from the token at `offset` on."""

    request: Request
    offset: int
    logprobs: Seq[object]


class Failure(Enum):
    """Why a request failed."""

    KEY_IN_USE = auto()
    DEADLINE_EXCEEDED = auto()
    CANCELLED = auto()
    INVALID = auto()
    SEARCH_TOO_WIDE = auto()
    TOO_MANY_TOKENS = auto()
    UNAVAILABLE = auto()
    TENANT_OVER_QUOTA = auto()
    DEADLINE_INFEASIBLE = auto()
    CONTEXT_LENGTH_EXCEEDED = auto()
    INTERNAL = auto()
    QUARANTINED = auto()
    UNKNOWN_REQUEST = auto()
    STORE_DEGRADED = auto()
    DIVERGED = auto()
    UNSUPPORTED_RESULT = auto()
    RECORD_INCOMPLETE = auto()
    RECORD_UNDECRYPTABLE = auto()
    PROMPT_TOO_COSTLY = auto()
    GRAMMAR_TOO_COMPLEX = auto()


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A request has failed. `message` is for people and holds no tokens; `retry_after` is in seconds."""

    request: Request
    reason: Failure
    message: str
    retry_after: float | None = None


Event = TokensEvent | PromptLogprobsEvent | FailedEvent
