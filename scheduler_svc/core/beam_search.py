"""Beam search by the rules of transformers' `generate`: its algorithm, and the sequences that are its beams.

All beams advance together: once each has its candidates, the best continuations of all are kept, each as the sequence
that it continues or as a fork of it. `beams.py` takes in candidates, `planning/forks.py` makes the forks.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

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
        # Tokens are copied only for beams that are kept: there are width * (width + stop tokens) candidates.
        for rank, (negative_score, index, token_id, logprob) in enumerate(ranked):
            if rank >= width and len(going_on) == width:
                break
            if token_id in ending_ids or length == self._max_tokens:
                if rank < width:
                    score = -negative_score / length**self.params.length_penalty
                    ending.append(self._continuation(index, token_id, logprob, score, candidates))
            elif len(going_on) < width:
                going_on.append(self._continuation(index, token_id, logprob, -negative_score, candidates))
        best = sorted([*self.finished, *ending], key=lambda beam: -beam.score)
        self.finished = best[:width]
        self.beams = going_on
        self.is_over = not self.beams or (len(self.finished) == width and not self._goes_on(length))

    def _continuation(
        self, parent: int, token_id: int, logprob: float, score: float, candidates: Seq[Seq[Candidate]]
    ) -> Beam:
        """A running beam with one more token."""
        choices = self.beams[parent].choices
        if self.params.logprobs is not None:
            choices = [*choices, Choice(logprob, candidates[parent][: self.params.logprobs])]
        return Beam([*self.beams[parent].tokens, token_id], score, choices, parent)

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


class BeamStep(NamedTuple):
    """A sequence, and the beams of its search that begin with its tokens.

    It continues as the beam `goes_on_as`. `forks` are the other beams, each with how many leading tokens it shares with
    the sequence. Beams are indices into `BeamSearch.beams`.
    """

    sequence: Sequence
    goes_on_as: int
    forks: list[tuple[int, int]]


class BeamGroup:
    """A search, and the sequences of its beams.

    Each beam has a sequence, except while `steps` lists how its sequences go on: after `advance`, or after `collapse`,
    which leaves one sequence.
    """

    def __init__(self, request: Request, params: BeamParams, first: Sequence) -> None:
        self.steps: list[BeamStep] = []
        self._first = first
        self._search = BeamSearch(params, request.max_tokens, request.stop_token_ids, request.min_tokens)
        self._sequences = {0: first}  # by beam
        self._candidates: dict[Sequence, Seq[Candidate]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._search.is_over

    @property
    def is_complete(self) -> bool:
        """Whether all beams have their candidates."""
        return not self.steps and len(self._candidates) == len(self._sequences)

    @property
    def is_due(self) -> bool:
        """Whether its sequences can go on by `steps`: all run and are computed."""
        return bool(self.steps) and all(
            step.sequence.is_unit_running and not (step.sequence.num_uncomputed or step.sequence.num_steps_in_flight)
            for step in self.steps
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of each beam, with the prompt."""
        return len(self._first.request.prompt) + len(self._search.beams[0].tokens)

    def output(self, beam: int) -> list[int]:
        """Output tokens of a beam."""
        return self._search.beams[beam].tokens

    def take(self, sequence: Sequence, num_tokens: int, result: SampledSequence) -> None:
        """Keeps the candidates that the worker returned after the first `num_tokens` tokens of a sequence.

        It ignores those of a sequence that was computed again after its beam had gone on.
        """
        if num_tokens == self.num_tokens:
            self._candidates[sequence] = cast(_TokenLogprobs, result.logprobs[0]).top

    def advance(self) -> list[Sequence]:
        """Advances all beams, or ends the search. Returns the sequences that no beam continues: they end."""
        before = [self._sequences[beam] for beam in range(len(self._search.beams))]
        self._search.advance([self._candidates[sequence] for sequence in before])
        self._candidates.clear()
        if self._search.is_over:
            return []
        indices: list[list[int]] = [[] for _ in before]
        for index, beam in enumerate(self._search.beams):
            indices[beam.parent].append(index)
        self.steps = [
            BeamStep(sequence, beams[0], [(beam, len(sequence.tokens)) for beam in beams[1:]])
            for sequence, beams in zip(before, indices, strict=True)
            if beams
        ]
        return [sequence for sequence, beams in zip(before, indices, strict=True) if not beams]

    def collapse(self) -> Sequence:
        """Its sequences lose their KV: the other beams are to be forked from the sequence of the best one.

        Returns this sequence. The others end.
        """
        leader = next((step.sequence for step in self.steps if step.goes_on_as == 0), self._sequences[0])
        best, *others = (beam.tokens for beam in self._search.beams)
        leader.append(best[leader.num_output :])
        num_prompt = len(self._first.request.prompt)
        forks = [(index, num_prompt + _num_shared(best, tokens)) for index, tokens in enumerate(others, 1)]
        self._candidates.clear()
        self._sequences = {0: leader}
        self.steps = [BeamStep(leader, 0, forks)] if forks else []
        return leader

    def num_new_blocks(self, block_size: int) -> int:
        """Blocks that all beams need to go on by `steps`, beyond those that their sequences have."""
        num_blocks = -(-self.num_tokens // block_size)
        num_own = sum(num_blocks - len(step.sequence.block_ids) for step in self.steps)
        return num_own + sum(num_blocks - shared // block_size for step in self.steps for _, shared in step.forks)

    def finish_steps(self, sequences: dict[int, Sequence]) -> None:
        """All beams have their sequences, by beam."""
        self._sequences, self.steps = sequences, []

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


def _num_shared(one: list[int], other: list[int]) -> int:
    """How many leading tokens two beams share."""
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


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
