"""Cosines of pairs, and which inputs are embedded for them."""

import math
import random
from array import array
from collections.abc import Sequence

import pytest

from gateway_svc.field_paths import Field
from gateway_svc.similarity import InputPairs
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.value_inputs import ValueInput, Vector, input_fields


def inputs(side: str, *texts: str, max_tokens: int | None = None) -> list[ValueInput]:
    names = [f"{side}[{index}]" for index in range(len(texts))]
    return [
        ValueInput(TextPrompt(text), input_fields(name, name, name), max_tokens)
        for text, name in zip(texts, names, strict=True)
    ]


def texts_of(pairs: InputPairs) -> list[str]:
    return [one.prompt.text for one in pairs.inputs if isinstance(one.prompt, TextPrompt)]


def cosines(*vectors: Sequence[float]) -> list[float]:
    """Of the first vector with each of the others."""
    names = [str(place) for place in range(len(vectors))]
    pairs = InputPairs.of(inputs("a", names[0]), inputs("b", *names[1:]))
    return pairs.cosines([array("f", vector) for vector in vectors])


def test_one_input_is_compared_with_each_of_the_others() -> None:
    pairs = InputPairs.of(inputs("queries", "a"), inputs("documents", "b", "c"))
    assert (texts_of(pairs), pairs.pairs) == (["a", "b", "c"], [(0, 1), (0, 2)])


def test_several_inputs_are_compared_with_those_at_their_places() -> None:
    pairs = InputPairs.of(inputs("queries", "a", "b"), inputs("documents", "c", "d"))
    assert (texts_of(pairs), pairs.pairs) == (["a", "b", "c", "d"], [(0, 2), (1, 3)])


def test_equal_texts_are_one_input_that_has_the_first_ones_name() -> None:
    pairs = InputPairs.of(inputs("queries", "a"), inputs("documents", "b", "a", "b", "c"))
    assert (texts_of(pairs), pairs.pairs) == (["a", "b", "c"], [(0, 1), (0, 0), (0, 1), (0, 2)])
    assert [one.field_path(Field.TEXT) for one in pairs.inputs] == ["queries[0]", "documents[0]", "documents[3]"]


def test_equal_texts_with_different_limits_are_two_inputs() -> None:
    pairs = InputPairs.of(inputs("queries", "a", max_tokens=1), inputs("documents", "a", "a", max_tokens=2))
    assert (texts_of(pairs), pairs.pairs) == (["a", "a"], [(0, 1), (0, 1)])


def test_cosines() -> None:
    found = cosines((3, 4), (4, 3), (-3, -4), (4, -3), (30, 40), (0, 0))
    assert found == pytest.approx([0.96, -1, 0, 1, 0], abs=1e-15)
    assert cosines((0, 0), (0, 0), (1, 0)) == [0, 0]


def test_cosines_are_in_their_range() -> None:
    rng = random.Random(7)
    for size in (1, 15, 16, 17, 63, 384):
        vector = [rng.uniform(-1, 1) for _ in range(size)]
        same, opposite = cosines(vector, vector, [-number for number in vector])
        assert same == pytest.approx(1)
        assert -1 <= opposite < 0 < same <= 1


@pytest.mark.parametrize("size", [1, 16, 384, 4_096])
def test_cosines_are_computed_in_64_bits(size: int) -> None:
    rng = random.Random(size)

    def vector() -> Vector:
        return array("f", (rng.gauss(0, 1e18) for _ in range(size)))

    left, right = vector(), vector()
    pairs = InputPairs.of(inputs("a", "left"), inputs("b", "right"))
    exact = math.fsum(a * b for a, b in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))
    assert pairs.cosines([left, right]) == pytest.approx([exact], abs=1e-13)
