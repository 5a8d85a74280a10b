"""The pairwise cover from which the kernels' tests take their cases."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

from pairwise import pairwise

PARAMETERS: Mapping[str, Sequence[Any]] = {
    "a": [1, 2, 3, 4, 5],
    "b": ["x", None, "y"],
    "c": [(1, 2), (2, 1)],
    "d": [True, False],
    "e": [0],
}


def test_every_pair_occurs() -> None:
    cases = pairwise(PARAMETERS)
    for (a, a_values), (b, b_values) in combinations(PARAMETERS.items(), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(a_values, b_values))


def test_far_fewer_cases_than_the_product() -> None:
    assert 15 <= len(pairwise(PARAMETERS)) <= 18


def test_the_same_cases_each_time() -> None:
    assert pairwise(PARAMETERS) == pairwise(PARAMETERS)
