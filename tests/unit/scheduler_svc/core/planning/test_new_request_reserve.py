"""Blocks are kept free for new requests of tenants with few slots, as long as they come."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from core_bench import SHAPE
from scheduler_svc.core.planning.new_request_reserve import NUM_REQUESTS, RESERVE_SECONDS, NewRequestReserve
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica


@pytest.fixture
def waiting() -> Any:
    """Has a clock."""
    return SimpleNamespace(now=10.0)


@pytest.fixture
def reserve(waiting: Any) -> NewRequestReserve:
    return NewRequestReserve(cast(WaitingSequences, waiting))


def replica_of(**num_slots: int) -> Replica:
    replica = Replica(SHAPE)
    replica.num_slots_of.update(num_slots)
    return replica


def test_nothing_is_kept_before_a_request_comes(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=15, few=1)
    assert (reserve.left_by(replica, "many"), reserve.left_by_all(replica)) == (0, 0)


def test_the_largest_need_is_kept_for_several(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=15, few=1)
    for num_blocks in (2, 3, 1):
        reserve.note(replica, "few", num_blocks)
    assert (reserve.left_by(replica, "many"), reserve.left_by_all(replica)) == (NUM_REQUESTS * 3, NUM_REQUESTS * 3)


def test_a_tenant_without_slots_is_one_with_few(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=16)
    reserve.note(replica, "new", 2)
    assert reserve.left_by(replica, "many") == 2 * NUM_REQUESTS


def test_tenants_with_as_few_slots_leave_nothing(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=12, few=2, other=2)
    reserve.note(replica, "few", 2)
    reserve.note(replica, "many", 7)
    assert reserve.left_by(replica, "few") == 0
    assert reserve.left_by(replica, "other") == 0
    assert reserve.left_by(replica, "many") == 2 * NUM_REQUESTS


def test_blocks_are_kept_for_a_while(reserve: NewRequestReserve, waiting: Any) -> None:
    replica = replica_of(many=16)
    reserve.note(replica, "few", 2)
    waiting.now += RESERVE_SECONDS - 1
    assert reserve.left_by_all(replica) == 2 * NUM_REQUESTS
    waiting.now += 2
    assert reserve.left_by_all(replica) == 0
    reserve.note(replica, "few", 1)
    assert reserve.left_by_all(replica) == NUM_REQUESTS


def test_at_most_a_sixteenth_of_the_blocks_is_kept(reserve: NewRequestReserve) -> None:
    replica = replica_of(many=16)
    reserve.note(replica, "few", SHAPE.num_blocks)
    assert reserve.left_by_all(replica) == SHAPE.num_blocks // 16


def test_each_replica_has_its_own_reserve(reserve: NewRequestReserve) -> None:
    replica, other = replica_of(many=16), replica_of(many=16)
    reserve.note(replica, "few", 2)
    assert (reserve.left_by_all(replica), reserve.left_by_all(other)) == (2 * NUM_REQUESTS, 0)
