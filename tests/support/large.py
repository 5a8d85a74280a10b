"""Cases that `make test` leaves out, because others of the same test show the same."""

from collections.abc import Iterable
from typing import Any

import pytest


def large_but(cases: Iterable[Any], *kept: Any, unpack: bool = False) -> list[Any]:
    """The cases of a parametrized test in their order, those but `kept` marked `large`. `unpack`: a case is a tuple of
    the values of several parameters.
    """
    cases = list(cases)
    unknown = [one for one in kept if one not in cases]
    assert not unknown, f"cases that the test does not have: {unknown}"
    values = [case if unpack else (case,) for case in cases]
    return [
        pytest.param(*each, marks=() if case in kept else pytest.mark.large)
        for case, each in zip(cases, values, strict=True)
    ]
