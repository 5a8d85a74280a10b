"""The numeric sampling parameters, one row each: names, ranges and defaults for both protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

Value: TypeAlias = int | float

DEFAULT_MAX_LOGPROBS = 20
"""The most top tokens that a request may have with each token, unless the operator says otherwise."""

HIGHEST_MAX_LOGPROBS = 128
"""The highest bound that an operator may set. With more, the log-probabilities of all tokens of a large step would not
fit a message of 64 MiB."""


class Least(Enum):
    """Whether a range includes its least value."""

    INCLUDED = "included"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A numeric sampling parameter.

    It has the same `name` in `Sampling` of the public contract, in HTTP bodies, in generation_config.json and in the
    worker's `SamplingParams`. `default` is Quire's own. A beam search accepts only the values `in_beam_search`, which
    have no effect there.
    """

    name: str
    least: Value
    most: Value
    default: Value
    in_beam_search: tuple[Value, ...]
    bound: Least = Least.INCLUDED
    may_be_configured: bool = False
    """Whether the operator may set another default, as a generation_config.json does."""
    resolve: Callable[[Value, int], Value] = lambda value, _vocab_size: value
    """The value for the worker, by the size of the vocabulary."""

    @property
    def is_integer(self) -> bool:
        return isinstance(self.default, int)

    def __contains__(self, value: Value) -> bool:
        """Whether a value is in the range. NaN is in none."""
        return (self.bound is Least.INCLUDED and value == self.least) or self.least < value <= self.most

    @property
    def range(self) -> str:
        if self.bound is Least.EXCLUDED:
            return f"above {self.least} and at most {self.most}"
        return f"between {self.least} and {self.most}"

    @property
    def path(self) -> str:
        """The field in the contract's Generation."""
        return f"sampling.{self.name}"


def _top_k(value: Value, vocab_size: int) -> Value:
    """0 means all tokens, however the client spells that."""
    return value if 0 < value < vocab_size else 0


def _typical_p(value: Value, _vocab_size: int) -> Value:
    """0, which is not sent, means all tokens, as in requests of earlier releases."""
    return value if value < 1 else 0


SAMPLING_FIELDS = (
    SamplingField("temperature", 0, 2, 1.0, (0,), may_be_configured=True),
    SamplingField("top_p", 0, 1, 1.0, (1,), Least.EXCLUDED, may_be_configured=True),
    SamplingField("top_k", -1, 2**63 - 1, 0, (0, -1), may_be_configured=True, resolve=_top_k),
    SamplingField("min_p", 0, 1, 0.0, (0,), may_be_configured=True),
    SamplingField("typical_p", 0, 1, 1.0, (1,), Least.EXCLUDED, may_be_configured=True, resolve=_typical_p),
    SamplingField("presence_penalty", -2, 2, 0.0, (0,)),
    SamplingField("frequency_penalty", -2, 2, 0.0, (0,)),
    SamplingField("repetition_penalty", 0, 10, 1.0, (1,), Least.EXCLUDED, may_be_configured=True),
)
