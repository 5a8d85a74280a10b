"""`fcfs` and `priority`, against a list that is sorted each time."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.policy import FcfsPolicy, Policy, PolicySettings, PriorityPolicy
from scheduler_svc.core.request import Request, Sequence

AGEING = 10.0


def waiting(number: int, **fields: Any) -> Sequence:
    return Sequence(number, Request(str(number), [1], 1, 1, **fields), 0, number, [1])


def by_arrival(sequence: Sequence) -> tuple[float, ...]:
    return (sequence.request.arrived_at, sequence.arrival)


def by_priority(sequence: Sequence) -> tuple[float, ...]:
    request = sequence.request
    return (request.arrived_at - AGEING * request.priority, *by_arrival(sequence))


ORDERS: list[tuple[Callable[[PolicySettings], Policy], Callable[[Sequence], tuple[float, ...]]]] = [
    (FcfsPolicy, by_arrival),
    (PriorityPolicy, by_priority),
]
SEQUENCES = st.lists(
    st.tuples(st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1)), st.integers(0, 60)), max_size=40
)


@pytest.mark.parametrize(("make", "order"), ORDERS)
@given(SEQUENCES, st.lists(st.integers(0, 50), max_size=60))
def test_order_is_that_of_a_sorted_list(
    make: Callable[[PolicySettings], Policy],
    order: Callable[[Sequence], tuple[float, ...]],
    requests: list[tuple[int, int]],
    choices: list[int],
) -> None:
    policy = make(PolicySettings(AGEING))
    sequences = [
        waiting(number, priority=priority, arrived_at=float(arrived_at))
        for number, (priority, arrived_at) in enumerate(requests)
    ]
    inside: list[Sequence] = []
    for choice in [*range(len(sequences)), *choices]:
        if choice >= len(sequences):
            continue
        if sequences[choice] in inside:
            inside.remove(sequences[choice])
            policy.remove(sequences[choice])
        else:
            inside.append(sequences[choice])
            policy.add(sequences[choice], 60.0)
        inside.sort(key=order)
        assert policy.first(60.0) is (inside[0] if inside else None)
        assert len(policy) == len(inside)
    assert [policy.position(sequence, 60.0) for sequence in inside] == list(range(len(inside)))


@given(st.integers(-5, 5), st.integers(0, 5), st.floats(0, 100))
def test_priority_overtakes_by_at_most_its_ageing_time(low: int, more: int, arrived_at: float) -> None:
    policy = PriorityPolicy(PolicySettings(AGEING))
    patient = waiting(0, priority=low, arrived_at=arrived_at)
    policy.add(waiting(1, priority=low + more, arrived_at=arrived_at + more * AGEING + 0.001), 0)
    policy.add(patient, 0)
    assert policy.first(0) is patient


def test_higher_priority_is_first_if_it_arrived_soon_enough() -> None:
    policy = PriorityPolicy(PolicySettings(AGEING))
    urgent = waiting(1, priority=1, arrived_at=9.9)
    policy.add(waiting(0, arrived_at=0.0), 0)
    policy.add(urgent, 0)
    assert policy.first(0) is urgent


@pytest.mark.parametrize("make", [FcfsPolicy, PriorityPolicy])
def test_first_victim_would_be_admitted_last(make: Callable[[PolicySettings], Policy]) -> None:
    policy = make(PolicySettings(AGEING))
    sequences = [waiting(n, priority=n % 3, arrived_at=float(n % 5)) for n in range(20)]
    for sequence in sequences:
        policy.add(sequence, 5.0)
    order = []
    while (first := policy.first(5.0)) is not None:
        policy.remove(first)
        order.append(first)
    assert sorted(sequences, key=policy.preemption_key) == order


def test_effective_priority_rises_by_one_per_ageing_time() -> None:
    policy = PriorityPolicy(PolicySettings(AGEING))
    sequence = waiting(0, priority=2, arrived_at=100.0)
    assert [policy.effective_priority(sequence, now) for now in (100.0, 109.9, 110.1, 135.0)] == [2, 2, 3, 5]


@pytest.mark.parametrize("make", [FcfsPolicy, PriorityPolicy])
def test_position_of_a_sequence_that_is_not_queued_is_an_error(make: Callable[[PolicySettings], Policy]) -> None:
    with pytest.raises(KeyError):
        make(PolicySettings()).position(waiting(0), 0.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_ageing_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="ageing_seconds"):
        PolicySettings(ageing_seconds=seconds)
