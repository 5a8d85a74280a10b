"""The sequences of one request that are the beams of its search."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, cast

from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.beam_search import BeamParams, BeamSearch, Candidate
from scheduler_svc.core.plan import Failure, MaxTokens, SampledSequence, StopToken, TokensEvent
from scheduler_svc.core.replica import ReplicaShape
from scheduler_svc.core.sequence import Phase, Request, Sequence


class _TokenLogprobs(Protocol):
    """What a worker tells of a place where log-probabilities were asked for."""

    @property
    def top(self) -> Seq[Candidate]:
        """The likeliest tokens, likeliest first."""


@dataclass(slots=True)
class BeamStep:
    """How a beam goes on: by these tokens, the first in `sequence` itself, each other one in a child of it."""

    sequence: Sequence
    next_tokens: list[int]
    _group: "BeamGroup"
    _places: list[int]

    def add_child(self, child: Sequence) -> None:
        """Say which sequence has the next of the tokens behind the first."""
        self._group.sequences[self._places.pop(0)] = child


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
        """Keep what may follow a beam, of which the worker told."""
        self._candidates[sequence.id] = cast(_TokenLogprobs, result.logprobs[0]).top

    def advance(self) -> list[BeamStep]:
        """Let all beams go on, or end the search. Those that go on in no way come first, since they make room."""
        before = self.sequences
        self._search.advance([self._candidates[s.id] for s in before])
        self._candidates = {}
        if self._search.is_over:
            return []
        beams = self._search.beams
        steps = []
        self.sequences = [before[beam.parent] for beam in beams]
        for parent, sequence in enumerate(before):
            places = [place for place, beam in enumerate(beams) if beam.parent == parent]
            steps.append(BeamStep(sequence, [beams[place].tokens[-1] for place in places], self, places[1:]))
        return sorted(steps, key=lambda step: len(step.next_tokens))

    def events(self) -> list[TokensEvent]:
        """What the search has found: the best sequences, each whole."""
        request = self._first.request
        events = []
        for index, found in enumerate(self._search.finished[: request.n]):
            last = found.tokens[-1]
            end = StopToken(last) if last in request.stop_token_ids else MaxTokens()
            tokens = [*request.prompt, *found.tokens]
            sequence = Sequence(self._first.id, request, index, self._first.arrival, tokens, Phase.ENDED)
            sequence.num_cached = self._first.num_cached
            events.append(TokensEvent(sequence, 0, found.tokens, found.choices, end, found.score))
        return events


def refuse_wide(request: Request, shape: ReplicaShape, max_sequences: int) -> AdmissionRefusal | None:
    """Say why a search's beams could not run side by side on a replica; None: they could, or it is no search.

    They share no more than the prompt for certain.
    """
    if request.beam is None:
        return None
    width, size = request.beam.width, shape.block_size
    num_own = -(-(request.max_tokens + len(request.prompt) % size) // size)
    if len(request.prompt) // size + width * num_own > shape.num_blocks:
        return AdmissionRefusal(
            Failure.SEARCH_TOO_WIDE, "the search is too wide for the memory of this model's workers"
        )
    if width > max_sequences:
        return AdmissionRefusal(Failure.SEARCH_TOO_WIDE, "the search is wider than a step of this model's workers")
    return None
