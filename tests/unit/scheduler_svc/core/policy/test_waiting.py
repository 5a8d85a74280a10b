"""Which waiting sequence is admitted or resumed next."""

import pytest

from core_bench import SHAPE
from scheduler_svc.core.admission import Admission, AdmissionLimits, Sharing
from scheduler_svc.core.policy import PolicySettings, PriorityPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request, Sequence

AGEING = 10.0


@pytest.fixture
def waiting() -> WaitingSequences:
    return WaitingSequences(PriorityPolicy(PolicySettings(AGEING)), Admission(AdmissionLimits(), Sharing.BY_ARRIVAL))


@pytest.fixture
def replica() -> Replica:
    return Replica(SHAPE)


def sequence(number: int, priority: int = 0, phase: Phase = Phase.QUEUED, beam: BeamParams | None = None) -> Sequence:
    request = Request(str(number), [1, 2], 1, 9, priority=priority, arrived_at=float(number), beam=beam)
    return Sequence(number, request, 0, number, [1, 2], phase)


def swapped(replica: Replica, number: int, priority: int = 0) -> Sequence:
    one = sequence(number, priority, Phase.PREEMPTED)
    replica.keep_swapped(one)
    return one


def test_swapped_sequence_precedes_queued_ones_of_its_class(waiting: WaitingSequences, replica: Replica) -> None:
    waiting.add(sequence(0))
    back = swapped(replica, 1)
    assert waiting.head(replica) is back


def test_queued_sequence_of_a_higher_class_precedes_a_swapped_one(waiting: WaitingSequences, replica: Replica) -> None:
    swapped(replica, 0)
    urgent = sequence(1, priority=1)
    waiting.add(urgent)
    assert waiting.head(replica) is urgent


def test_swapped_sequence_rises_with_waiting(waiting: WaitingSequences, replica: Replica) -> None:
    old = swapped(replica, 0)
    now = waiting.now = AGEING + 2
    waiting.add(sequence(int(now), priority=1))
    assert waiting.head(replica) is old


def test_sequences_swapped_on_another_replica_do_not_matter(waiting: WaitingSequences, replica: Replica) -> None:
    swapped(Replica(SHAPE), 0)
    assert waiting.head(replica) is None


@pytest.mark.parametrize("num_output", [0, 3])
def test_search_waits_in_the_order_of_the_queue(waiting: WaitingSequences, replica: Replica, num_output: int) -> None:
    """Also one that ran before."""
    urgent, beam = sequence(0, priority=5), sequence(1, beam=BeamParams(2, 1.0, EarlyStopping.NEVER))
    beam.tokens += [3] * num_output
    waiting.add(beam)
    waiting.add(urgent)
    assert waiting.head(replica) is urgent
    waiting.remove(urgent)
    assert waiting.head(replica) is beam


def test_sequence_is_queued_once_its_producer_is_far_enough(waiting: WaitingSequences, replica: Replica) -> None:
    producer, waiter = sequence(0, phase=Phase.RUNNING), sequence(1)
    waiting.wait_for_prefix(producer, 8, waiter)
    producer.num_committed = 7
    waiting.release_ready(producer)
    assert waiting.head(replica) is None
    assert len(waiting) == 1
    producer.num_committed = 8
    waiting.release_ready(producer)
    assert waiting.head(replica) is waiter
    assert waiter.phase is Phase.QUEUED
    assert len(waiting) == 1
