"""What is left to new requests of tenants with few slots, as long as they come."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from core_bench import SHAPE, prompt
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.planning.new_request_reserve import (
    NUM_REQUESTS,
    PERIOD_SECONDS,
    RESERVE_SECONDS,
    NewRequestReserve,
)
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence


@pytest.fixture
def waiting() -> Any:
    """Has a clock."""
    return SimpleNamespace(now=10.0)


@pytest.fixture
def reserve(waiting: Any) -> NewRequestReserve:
    return NewRequestReserve(cast(WaitingSequences, waiting))


def sequence_of(tenant: str, number: int = 0, **request: Any) -> Sequence:
    tokens = prompt(3)
    return Sequence(number, Request(f"{number}", tokens, 1, 4, tenant=tenant, **request), 0, number, tokens)


def note(reserve: NewRequestReserve, replica: Replica, tenant: str, num_blocks: int, **request: Any) -> None:
    reserve.note(replica, sequence_of(tenant, **request), num_blocks)


def replica_of(**num_slots: int) -> Replica:
    """Each tenant has so many sequences."""
    replica = Replica(SHAPE)
    for tenant, count in num_slots.items():
        for number in range(count):
            replica.admit(sequence_of(tenant, number), Hit([]))
    return replica


def left_by(reserve: NewRequestReserve, replica: Replica, tenant: str, priority: int = 0) -> int:
    return reserve.left_by(replica, sequence_of(tenant, priority=priority))


def test_nothing_is_kept_before_a_request_comes(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=15, few=1)
    assert (left_by(reserve, replica, "many"), reserve.left_by_all(replica)) == (0, 0)


def test_the_largest_need_is_kept_for_several(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=15, few=1)
    for num_blocks in (2, 3, 1):
        note(reserve, replica, "few", num_blocks)
    assert (left_by(reserve, replica, "many"), reserve.left_by_all(replica)) == (NUM_REQUESTS * 3, NUM_REQUESTS * 3)


def test_a_tenant_without_slots_is_one_with_few(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=16)
    note(reserve, replica, "new", 2)
    assert left_by(reserve, replica, "many") == 2 * NUM_REQUESTS


def test_tenants_with_as_few_slots_leave_nothing(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=12, few=2, other=2)
    note(reserve, replica, "few", 2)
    note(reserve, replica, "many", 7)
    assert left_by(reserve, replica, "few") == 0
    assert left_by(reserve, replica, "other") == 0
    assert left_by(reserve, replica, "many") == 2 * NUM_REQUESTS


def test_blocks_are_kept_for_a_while(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_of(many=16)
    note(reserve, replica, "few", 2)
    waiting.now += RESERVE_SECONDS - 1
    assert reserve.left_by_all(replica) == 2 * NUM_REQUESTS
    waiting.now += 2
    assert reserve.left_by_all(replica) == 0
    note(reserve, replica, "few", 1)
    assert reserve.left_by_all(replica) == NUM_REQUESTS


def test_at_most_a_sixteenth_of_the_blocks_is_kept(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=16)
    note(reserve, replica, "few", SHAPE.num_blocks)
    assert reserve.left_by_all(replica) == SHAPE.num_blocks // 16


def test_each_replica_has_its_own_reserve(reserve: NewRequestReserve) -> None:
    replica, other = replica_of(many=16), replica_of(many=16)
    note(reserve, replica, "few", 2)
    assert (reserve.left_by_all(replica), reserve.left_by_all(other)) == (2 * NUM_REQUESTS, 0)


def replica_with(**weights: float) -> Replica:
    """Four sequences of each tenant run."""
    replica = Replica(SHAPE)
    for number, (tenant, weight) in enumerate(4 * list(weights.items())):
        replica.admit(sequence_of(tenant, number, weight=weight), Hit([]))
    return replica


def limited(reserve: NewRequestReserve, replica: Replica) -> set[str]:
    """Tenants whose prompts are limited."""
    return set(reserve.prompt_limit(replica).priorities)


def test_prompts_of_tenants_with_several_times_as_many_slots_are_limited(reserve: NewRequestReserve) -> None:
    replica = replica_with(some=1.0)
    assert not reserve.prompt_limit(replica)
    note(reserve, replica, "new", 2)
    assert limited(reserve, replica) == {"some"}
    replica.num_slots_of["new"] = 1
    assert not reserve.prompt_limit(replica)


def test_prompts_are_limited_by_weight(reserve: NewRequestReserve) -> None:
    replica = replica_with(light=0.2, usual=1.0, heavy=3.0)
    note(reserve, replica, "new", 2)
    assert limited(reserve, replica) == {"light", "usual"}
    note(reserve, replica, "new", 2, weight=0.5)
    assert limited(reserve, replica) == {"light"}


def test_prompts_of_one_of_many_tenants_are_not_limited(reserve: NewRequestReserve) -> None:
    note(reserve, replica := replica_with(**dict.fromkeys("abcde", 1.0)), "new", 2)
    assert not reserve.prompt_limit(replica)
    note(reserve, replica := replica_with(**dict.fromkeys("abcd", 1.0)), "new", 2)
    assert limited(reserve, replica) == set("abcd")


def test_prompts_are_limited_for_a_while(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_with(usual=1.0)
    note(reserve, replica, "new", 2)
    waiting.now += RESERVE_SECONDS + 1
    assert not reserve.prompt_limit(replica)


def test_prompts_of_higher_priority_than_new_requests_are_not_limited(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_with(jobs=1.0)
    note(reserve, replica, "new", 2, priority=-2)
    low, high = sequence_of("jobs", priority=-2), sequence_of("jobs", priority=-1)
    limit = reserve.prompt_limit(replica)
    assert limit.applies_to(low)
    assert not limit.applies_to(high)
    assert not limit.applies_to(sequence_of("other", priority=-2))
    note(reserve, replica, "another", 2, priority=3)
    assert reserve.prompt_limit(replica).applies_to(high), "of several priorities the highest counts"
    waiting.now += RESERVE_SECONDS - 1
    note(reserve, replica, "new", 2, priority=-2)
    waiting.now += 2
    assert not reserve.prompt_limit(replica).applies_to(high), "it counts for its own time"
    assert reserve.prompt_limit(replica).applies_to(low)


def test_the_limit_for_a_new_request_is_that_of_its_own_tenant_and_priority(reserve: NewRequestReserve) -> None:
    replica = replica_with(jobs=1.0)
    job = sequence_of("jobs")
    note(reserve, replica, "new", 2, priority=-1)
    assert reserve.limit_for(replica, sequence_of("new")).applies_to(job)
    assert not reserve.limit_for(replica, sequence_of("new", priority=-1)).applies_to(job)
    assert not reserve.limit_for(replica, sequence_of("other")), "no new requests of it came"
    resumed = sequence_of("new")
    resumed.tokens = [*resumed.tokens, 7]
    assert resumed.num_output == 1
    assert not reserve.limit_for(replica, resumed)


def test_sequences_of_higher_priority_leave_no_blocks(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=15)
    note(reserve, replica, "few", 2, priority=-1)
    assert left_by(reserve, replica, "many", priority=-1) == 2 * NUM_REQUESTS
    assert left_by(reserve, replica, "many", priority=0) == 0
    assert reserve.left_by_all(replica) == 0, "nothing of lower priority runs that could be preempted"
    replica.admit(sequence_of("many", 15, priority=-1), Hit([]))
    assert reserve.left_by_all(replica) == 2 * NUM_REQUESTS


def test_the_largest_need_counts_for_its_own_time(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_of(many=16)
    note(reserve, replica, "few", 3)
    waiting.now += RESERVE_SECONDS - 1
    note(reserve, replica, "few", 1)
    assert reserve.left_by_all(replica) == 3 * NUM_REQUESTS
    waiting.now += 2
    assert reserve.left_by_all(replica) == NUM_REQUESTS


def test_a_tenant_has_few_needs_however_many_requests_it_sends(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_of(many=16)
    for number in range(10_000):
        waiting.now += 0.01
        note(reserve, replica, "few", 10_000 - number, priority=-number)
    most = 1 + RESERVE_SECONDS / PERIOD_SECONDS
    assert len(reserve._current(replica)) <= most
