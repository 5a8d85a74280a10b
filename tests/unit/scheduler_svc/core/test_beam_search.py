"""The search against transformers' rules over whole tensors, on random models."""

import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from beam_rules import Rules, search
from memory_worker import Option
from scheduler_svc.core.beam_search import Beam, BeamSearch, num_candidates
from scheduler_svc.core.request import BeamParams, EarlyStopping

VOCAB = 24
EARLY_STOPPING: dict[EarlyStopping, bool | Literal["never"]] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.AT_WIDTH: True,
    EarlyStopping.NEVER: "never",
}


@dataclass(frozen=True)
class Model:
    """The next tokens are a function of all earlier tokens; a greater `bias` makes stop tokens more probable."""

    seed: int
    stops: tuple[int, ...]
    bias: float

    def log_probs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float64, [VOCAB]."""
        rng = random.Random(zlib.crc32(array("I", [self.seed, *tokens]).tobytes()))
        logits = [rng.gauss(0.0, 1.5) + self.bias * (token in self.stops) for token in range(VOCAB)]
        return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)

    def options(self, tokens: Sequence[int], count: int) -> list[Option]:
        """The candidates as a worker returns them."""
        values, ids = torch.topk(self.log_probs(tokens), count)
        return [Option(token, value) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]


@dataclass(frozen=True)
class Case:
    model: Model
    params: BeamParams
    max_tokens: int
    min_tokens: int

    def run(self) -> BeamSearch:
        """Runs the search to its end."""
        stops = self.model.stops
        found = BeamSearch(self.params, self.max_tokens, frozenset(stops), self.min_tokens)
        count = num_candidates(self.params.width, len(stops))
        while not found.is_over:
            found.advance([self.model.options(beam.tokens, count) for beam in found.beams])
        return found

    def expected(self) -> list[tuple[list[int], float]]:
        rules = Rules(
            num_beams=self.params.width,
            length_penalty=self.params.length_penalty,
            early_stopping=EARLY_STOPPING[self.params.early_stopping],
            max_new_tokens=self.max_tokens,
            eos_token_ids=self.model.stops,
            min_new_tokens=self.min_tokens,
        )
        return search(self.model.log_probs, rules)


def case(seed: int, early_stopping: EarlyStopping, length_penalty: float) -> Case:
    rng = random.Random(seed)
    stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 2, 4])))
    model = Model(seed, stops, bias=rng.choice([-2.0, 0.0, 1.0, 2.0]))
    params = BeamParams(rng.randint(1, 4), length_penalty, early_stopping)
    max_tokens = rng.choice([1, 2, 5, 12, 20])
    return Case(model, params, max_tokens, min_tokens=rng.choice([0, 0, 1, 3, max_tokens]))


@pytest.mark.parametrize("length_penalty", [-1.0, -0.3, 0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
def test_finds_what_transformers_would(early_stopping: EarlyStopping, length_penalty: float) -> None:
    for seed in range(25):
        one = case(seed, early_stopping, length_penalty)
        finished, expected = one.run().finished, one.expected()
        assert [beam.tokens for beam in finished] == [tokens for tokens, _ in expected]
        assert [beam.score for beam in finished] == pytest.approx([score for _, score in expected])


def test_how_to_stop_makes_a_difference() -> None:
    """Otherwise the test above could not distinguish the variants."""
    differences = dict.fromkeys(EarlyStopping, 0)
    for seed in range(40):
        patient = case(seed, EarlyStopping.NEVER, 1.0)
        for early_stopping in EarlyStopping:
            hasty = replace(patient, params=replace(patient.params, early_stopping=early_stopping))
            differences[early_stopping] += hasty.run().finished != patient.run().finished
    assert differences[EarlyStopping.AT_WIDTH] > differences[EarlyStopping.HEURISTIC] > 0
    assert differences[EarlyStopping.NEVER] == 0


def advance(search: BeamSearch, *candidates: list[tuple[int, float]]) -> list[Beam]:
    search.advance([[Option(*option) for option in options] for options in candidates])
    return search.beams


def test_stop_token_that_is_not_among_the_best_ends_nothing() -> None:
    search = BeamSearch(BeamParams(2, 0.0, EarlyStopping.NEVER), 9, frozenset({0}))
    beams = advance(search, [(1, -0.1), (2, -0.2), (0, -0.3)])
    assert [beam.tokens for beam in beams] == [[1], [2]]
    assert search.finished == []


def test_search_without_early_stopping_expects_nothing_of_length_if_length_is_penalized() -> None:
    search = BeamSearch(BeamParams(2, -1.0, EarlyStopping.NEVER), 9, frozenset({0}))
    advance(search, [(1, -0.1), (0, -5.0), (2, -6.0)])
    advance(search, [(0, -0.1), (3, -1.0), (4, -1.5)], [(3, -1.0), (4, -2.0), (0, -3.0)])
    assert [beam.score for beam in search.finished] == pytest.approx([-0.4, -5.0])
    assert not search.is_over, "the best beam would end with -2.2 now, with -9.9 at its longest"


def test_each_beam_names_the_one_that_it_continues() -> None:
    search = BeamSearch(BeamParams(2, 0.0, EarlyStopping.NEVER), 9, frozenset())
    advance(search, [(1, -0.1), (2, -1.0)])
    beams = advance(search, [(3, -5.0), (4, -6.0)], [(5, -0.1), (6, -0.2)])
    assert [(beam.tokens, beam.parent) for beam in beams] == [([2, 5], 1), ([2, 6], 1)]


def test_log_probabilities_of_each_token_are_kept_if_requested() -> None:
    search = BeamSearch(BeamParams(1, 0.0, EarlyStopping.NEVER, logprobs=1), 2, frozenset({9}))
    advance(search, [(1, -0.1), (2, -1.0)])
    advance(search, [(3, -0.2), (4, -1.0)])
    [found] = search.finished
    assert [(choice.logprob, [option.token_id for option in choice.top]) for choice in found.choices] == [
        (-0.1, [1]),
        (-0.2, [3]),
    ]


def test_stop_tokens_are_barred_until_min_tokens_are_there() -> None:
    search = BeamSearch(BeamParams(1, 0.0, EarlyStopping.AT_WIDTH), 9, frozenset({0}), min_tokens=1)
    advance(search, [(0, -0.1), (1, -1.0)])
    assert search.beams[0].tokens == [1]
    advance(search, [(0, -0.1), (1, -1.0)])
    assert search.is_over
    assert search.finished[0].tokens == [1, 0]


def test_tokens_are_copied_for_the_beams_that_are_kept_only(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Beam] = []

    def build(*args: Any) -> Beam:
        built.append(Beam(*args))
        return built[-1]

    width = 16
    search = BeamSearch(BeamParams(width, 0.0, EarlyStopping.NEVER), 9, frozenset({0}))
    monkeypatch.setattr("scheduler_svc.core.beam_search.Beam", build)
    options = [(token, -0.1 * token) for token in range(width + 1)]
    advance(search, options)
    for _ in range(3):
        built.clear()
        advance(search, *[options] * width)
        assert len(search.beams) == width
        assert len(built) <= 2 * width  # those that go on, and those that end
