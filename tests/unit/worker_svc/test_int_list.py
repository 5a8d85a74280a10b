"""Lists of integers that numpy reads without a copy."""

import pytest

from worker_svc.int_list import IntList


def test_it_grows_by_one_and_by_many() -> None:
    values = IntList([1, 2])
    for value in range(3, 40):
        values.append(value)
    values.extend(range(40, 111))
    assert len(values) == 110
    assert values.values.tolist() == [*range(1, 111)]


def test_an_empty_one_grows() -> None:
    values = IntList()
    values.append(7)
    assert values.values.tolist() == [7]


def test_a_value_changes_in_its_place() -> None:
    values = IntList([1, 2, 3])
    values[1] = -5
    assert values.values.tolist() == [1, -5, 3]


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_that_is_not_there_is_refused(place: int) -> None:
    values = IntList([1, 2, 3])
    with pytest.raises(IndexError):
        values[place] = 0
