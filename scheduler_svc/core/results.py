"""Kinds of results: tokens, tokens with log-probabilities of the prompt, or one value."""

from dataclasses import dataclass
from enum import Enum, auto


class ResultForm(Enum):
    """What a request returns."""

    TOKENS = auto()
    TOKENS_AND_PROMPT_LOGPROBS = auto()  # also the log-probability of each token of the prompt but the first
    VALUE = auto()  # one value for the whole prompt, and no tokens


@dataclass(frozen=True, slots=True)
class ResultKind:
    """A kind of result. Workers report the kinds that they compute by `name`, which is unique."""

    name: str
    form: ResultForm


TOKENS = ResultKind("tokens", ResultForm.TOKENS)
PROMPT_LOGPROBS = ResultKind("prompt_logprobs", ResultForm.TOKENS_AND_PROMPT_LOGPROBS)


class PromptComputation(Enum):
    """How a worker computes a prompt for a value."""

    CHUNKED = auto()  # in any number of steps, after a cached prefix
    INDIVISIBLE = auto()  # all of it in one step
    INDIVISIBLE_WITHOUT_KV = auto()  # all of it in one step, which stores no KV
