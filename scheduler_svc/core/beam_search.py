"""Beam search over the continuations that a worker finds likeliest, by the rules of transformers' `generate`.

The sequences of a request that run are its beams. All of them advance together: once each has its candidates, the best
of all go on, as the sequence that they continue or as forks of it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class EarlyStopping(Enum):
    """When a search ends that has as many finished sequences as it is wide."""

    HEURISTIC = auto()  # when no beam, were it to end now, would be better than the worst of them
    AT_WIDTH = auto()  # at once
    NEVER = auto()  # when no beam can become better than the worst of them, at whatever length it ends


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search. A finished sequence's score is its log-probability over length to the power of `length_penalty`.

    `logprobs` is how many likeliest tokens to tell of at each place; None where no log-probabilities were asked for.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    logprobs: int | None = None


class Candidate(Protocol):
    """A token that may come next."""

    @property
    def token_id(self) -> int:
        """The token."""

    @property
    def logprob(self) -> float:
        """The natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was taken, by its log-probability, and the likeliest at its place, likeliest first."""

    logprob: float
    top: Seq[Candidate]


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens, and their score: the sum of their log-probabilities, which `length_penalty` divides once they are
    finished. `choices` is one for each token where log-probabilities were asked for, `parent` the beam it continues.
    """

    tokens: list[int]
    score: float
    choices: list[Choice]
    parent: int = 0


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """How many candidates a beam needs: so many that, even if each stop token is among them, `width` can go on."""
    return width + num_stop_tokens


class BeamSearch:
    """One search. `beams` are those that run, best first; `finished` the best that ended, best first."""

    def __init__(
        self, params: BeamParams, max_tokens: int, stop_token_ids: frozenset[int], min_tokens: int = 0
    ) -> None:
        self.params = params
        self.beams = [Beam([], 0.0, [])]
        self.finished: list[Beam] = []
        self.is_over = False
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids

    def advance(self, candidates: Seq[Seq[Candidate]]) -> None:
        """Take one step, from each beam's candidates, likeliest first."""
        length = len(self.beams[0].tokens) + 1
        width = self.params.width
        ending_ids = self._stop_token_ids if length > self._min_tokens else frozenset[int]()
        barred_ids = self._stop_token_ids - ending_ids
        ranked = sorted(
            (-(beam.score + option.logprob), place, option.token_id, option.logprob)
            for place, (beam, options) in enumerate(zip(self.beams, candidates, strict=True))
            for option in options
            if option.token_id not in barred_ids
        )
        going_on: list[Beam] = []
        ending: list[Beam] = []
        for rank, (negative_score, place, token_id, logprob) in enumerate(ranked):
            tokens, choices = [*self.beams[place].tokens, token_id], self.beams[place].choices
            if self.params.logprobs is not None:
                choices = [*choices, Choice(logprob, candidates[place][: self.params.logprobs])]
            if token_id not in ending_ids and length < self._max_tokens:
                going_on.append(Beam(tokens, -negative_score, choices, place))
            elif rank < width:
                score = -negative_score / length**self.params.length_penalty
                ending.append(Beam(tokens, score, choices, place))
        best = sorted([*self.finished, *ending], key=lambda beam: -beam.score)
        self.finished = best[:width]
        self.beams = going_on[:width]
        self.is_over = not self.beams or (len(self.finished) == width and not self._goes_on(length))

    def _goes_on(self, length: int) -> bool:
        """Whether the best beam may yet become better than the worst finished sequence, and is waited for."""
        if self.params.early_stopping is EarlyStopping.AT_WIDTH:
            return False
        penalty = self.params.length_penalty
        is_patient = self.params.early_stopping is EarlyStopping.NEVER and penalty > 0
        best_possible = self.beams[0].score / float(self._max_tokens if is_patient else length) ** penalty
        return bool(best_possible > self.finished[-1].score)
