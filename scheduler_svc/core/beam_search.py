"""Beam search by the rules of transformers' `generate`: its algorithm, and the sequences that are its beams.

All beams advance together: once each has its candidates, the best continuations of all are kept, each as the sequence
that it continues or as a fork of it. `beams.py` applies that to the scheduler.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, cast

from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure, MaxTokens, StopToken, TokensEvent
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request, Sequence
from scheduler_svc.core.step import SampledSequence


class Candidate(Protocol):
    """A token that may follow."""

    @property
    def token_id(self) -> int:
        """The token."""

    @property
    def logprob(self) -> float:
        """The natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The log-probability of a chosen token, and the top tokens at its position, most probable first."""

    logprob: float
    top: Seq[Candidate]


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens and their score: the sum of their log-probabilities, over the length penalty once it is finished.

    `choices` has one entry per token if log-probabilities were requested. `parent` is the beam that it continues.
    """

    tokens: list[int]
    score: float
    choices: list[Choice]
    parent: int = 0


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """How many candidates a beam needs, so that `width` can continue even if every stop token is among them."""
    return width + num_stop_tokens


class BeamSearch:
    """One search. `beams` are the running ones, `finished` the best finished ones, both best first."""

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
        """Advances all beams by one token, from each one's candidates, most probable first."""
        length = len(self.beams[0].tokens) + 1
        width = self.params.width
        ending_ids = self._stop_token_ids if length > self._min_tokens else frozenset[int]()
        barred_ids = self._stop_token_ids - ending_ids
        ranked = sorted(
            (-(beam.score + option.logprob), index, option.token_id, option.logprob)
            for index, (beam, options) in enumerate(zip(self.beams, candidates, strict=True))
            for option in options
            if option.token_id not in barred_ids
        )
        going_on: list[Beam] = []
        ending: list[Beam] = []
        for rank, (negative_score, index, token_id, logprob) in enumerate(ranked):
            tokens, choices = [*self.beams[index].tokens, token_id], self.beams[index].choices
            if self.params.logprobs is not None:
                choices = [*choices, Choice(logprob, candidates[index][: self.params.logprobs])]
            if token_id not in ending_ids and length < self._max_tokens:
                going_on.append(Beam(tokens, -negative_score, choices, index))
            elif rank < width:
                score = -negative_score / length**self.params.length_penalty
                ending.append(Beam(tokens, score, choices, index))
        best = sorted([*self.finished, *ending], key=lambda beam: -beam.score)
        self.finished = best[:width]
        self.beams = going_on[:width]
        self.is_over = not self.beams or (len(self.finished) == width and not self._goes_on(length))

    def _goes_on(self, length: int) -> bool:
        """Whether the best beam may still become better than the worst finished sequence."""
        if self.params.early_stopping is EarlyStopping.AT_WIDTH:
            return False
        penalty = self.params.length_penalty
        is_patient = self.params.early_stopping is EarlyStopping.NEVER and penalty > 0
        best_possible = self.beams[0].score / float(self._max_tokens if is_patient else length) ** penalty
        return bool(best_possible > self.finished[-1].score)


class _TokenLogprobs(Protocol):
    """A worker's log-probabilities for one token."""

    @property
    def top(self) -> Seq[Candidate]:
        """The top tokens, most probable first."""


@dataclass(slots=True)
class BeamStep:
    """How a beam continues: with these tokens, the first in `sequence` itself, each other one in a fork of it."""

    sequence: Sequence
    next_tokens: list[int]
    _group: "BeamGroup"
    _indices: list[int]

    def add_child(self, child: Sequence) -> None:
        """Adds the fork for the next of the tokens after the first."""
        self._group.sequences[self._indices.pop(0)] = child


class BeamGroup:
    """A search, and the sequence of each of its beams."""

    def __init__(self, request: Request, params: BeamParams, first: Sequence) -> None:
        self.sequences = [first]
        self._first = first
        self._search = BeamSearch(params, request.max_tokens, request.stop_token_ids, request.min_tokens)
        self._candidates: dict[int, Seq[Candidate]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._search.is_over

    @property
    def is_complete(self) -> bool:
        """Whether all beams have their candidates, and none is computing them again."""
        return all(s.id in self._candidates and not s.num_promised for s in self.sequences)

    def take(self, sequence: Sequence, result: SampledSequence) -> None:
        """Keeps the candidates that the worker returned for a beam."""
        self._candidates[sequence.id] = cast(_TokenLogprobs, result.logprobs[0]).top

    def advance(self) -> list[BeamStep]:
        """Advances all beams, or ends the search. Beams that end come first, since they free blocks."""
        before = self.sequences
        self._search.advance([self._candidates[s.id] for s in before])
        self._candidates = {}
        if self._search.is_over:
            return []
        beams = self._search.beams
        steps = []
        self.sequences = [before[beam.parent] for beam in beams]
        for parent, sequence in enumerate(before):
            indices = [index for index, beam in enumerate(beams) if beam.parent == parent]
            steps.append(BeamStep(sequence, [beams[index].tokens[-1] for index in indices], self, indices[1:]))
        return sorted(steps, key=lambda step: len(step.next_tokens))

    def events(self) -> list[TokensEvent]:
        """The best sequences of a search that has ended, each complete."""
        request = self._first.request
        events = []
        for index, found in enumerate(self._search.finished[: request.n]):
            last = found.tokens[-1]
            end = StopToken(last) if last in request.stop_token_ids else MaxTokens()
            tokens = [*request.prompt, *found.tokens]
            sequence = Sequence(self._first.id, request, index, self._first.arrival, tokens, Phase.ENDED)
            sequence.num_cached_prompt_tokens = self._first.num_cached_prompt_tokens
            events.append(TokensEvent(sequence, 0, found.tokens, found.choices, end, found.score))
        return events


def refuse_wide(request: Request, shape: ReplicaShape, max_sequences: int) -> AdmissionRefusal | None:
    """Why the beams of a request could not run at the same time on a replica, or None."""
    if request.beam is None:
        return None
    width = request.beam.width
    if request.max_blocks(shape.block_size) > shape.num_blocks:
        return AdmissionRefusal(
            Failure.SEARCH_TOO_WIDE, "the search is too wide for the memory of this model's workers"
        )
    if width > max_sequences:
        return AdmissionRefusal(Failure.SEARCH_TOO_WIDE, "the search is wider than a step of this model's workers")
    return None
