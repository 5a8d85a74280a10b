"""A small cover of a product of parameters: every pair of values of any two parameters occurs in some case."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases with a value for every parameter. Deterministic and few, but not the minimum.

    Greedy: a case starts from the first uncovered pair. Each further parameter takes the value that covers the most
    pairs with the values chosen so far.
    """
    names = list(parameters)
    # Values by their index, since not all can be hashed or compared
    missing = {
        frozenset([(a, i), (b, j)]): None
        for a, b in combinations(names, 2)
        for i, j in product(range(len(parameters[a])), range(len(parameters[b])))
    }
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(parameters[name])),
                    key=lambda i: sum(frozenset([(name, i), other]) in missing for other in chosen.items()),
                )
        for pair in combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: parameters[name][chosen[name]] for name in names})
    return cases
