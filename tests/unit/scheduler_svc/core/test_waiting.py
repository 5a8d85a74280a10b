"""Who comes in next."""

import pytest

from core_bench import SHAPE
from scheduler_svc.core.admission import Admission, AdmissionLimits, Sharing
from scheduler_svc.core.beam_search import BeamParams, EarlyStopping
from scheduler_svc.core.policies import PolicySettings, PriorityPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Request, Sequence
from scheduler_svc.core.waiting import WaitingSequences

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


def beam_that_goes_on(number: int) -> Sequence:
    beam = sequence(number, beam=BeamParams(2, 1.0, EarlyStopping.NEVER))
    beam.tokens = [1, 2, 3]
    return beam


def swapped(replica: Replica, number: int, priority: int = 0) -> Sequence:
    one = sequence(number, priority, Phase.PREEMPTED)
    replica.keep_swapped(one)
    return one


def test_who_was_swapped_comes_back_before_newcomers_of_its_class(waiting: WaitingSequences, replica: Replica) -> None:
    waiting.add(sequence(0), 1.0)
    back = swapped(replica, 1)
    assert waiting.head(replica, 1.0) is back


def test_newcomer_of_a_higher_class_comes_before_who_was_swapped(waiting: WaitingSequences, replica: Replica) -> None:
    swapped(replica, 0)
    urgent = sequence(1, priority=1)
    waiting.add(urgent, 1.0)
    assert waiting.head(replica, 1.0) is urgent


def test_who_was_swapped_long_ago_has_risen(waiting: WaitingSequences, replica: Replica) -> None:
    old = swapped(replica, 0)
    now = AGEING + 2
    waiting.add(sequence(int(now), priority=1), now)
    assert waiting.head(replica, now) is old


def test_images_of_another_replica_do_not_matter(waiting: WaitingSequences, replica: Replica) -> None:
    swapped(Replica(SHAPE), 0)
    assert waiting.head(replica, 1.0) is None


def test_beam_that_its_siblings_wait_for_comes_before_all(waiting: WaitingSequences, replica: Replica) -> None:
    swapped(replica, 0)
    waiting.add(sequence(1, priority=5), 1.0)
    beam = beam_that_goes_on(2)
    waiting.add(beam, 1.0)
    assert waiting.head(replica, 1.0) is beam
    waiting.remove(beam)
    assert waiting.head(replica, 1.0) is not beam


def test_retired_replica_takes_only_a_beam_that_its_siblings_wait_for_there(
    waiting: WaitingSequences, replica: Replica
) -> None:
    replica.is_retired = True
    beam, sibling = beam_that_goes_on(0), beam_that_goes_on(1)
    beam.siblings = sibling.siblings = [beam, sibling]
    waiting.add(sequence(2), 1.0)
    waiting.add(beam, 1.0)
    assert waiting.head(replica, 1.0) is None
    replica.running.append(sibling)
    assert waiting.head(replica, 1.0) is beam


def test_search_that_has_not_begun_waits_like_everybody(waiting: WaitingSequences, replica: Replica) -> None:
    urgent, beam = sequence(0, priority=5), sequence(1, beam=BeamParams(2, 1.0, EarlyStopping.NEVER))
    waiting.add(beam, 1.0)
    waiting.add(urgent, 1.0)
    assert waiting.head(replica, 1.0) is urgent


def test_follower_queues_once_its_leader_is_far_enough(waiting: WaitingSequences, replica: Replica) -> None:
    leader, follower = sequence(0, phase=Phase.RUNNING), sequence(1)
    waiting.wait_for_prefix(leader, 8, follower)
    leader.num_committed = 7
    waiting.release_ready(leader, 1.0)
    assert waiting.head(replica, 1.0) is None
    assert len(waiting) == 1
    leader.num_committed = 8
    waiting.release_ready(leader, 1.0)
    assert waiting.head(replica, 1.0) is follower
    assert follower.phase is Phase.QUEUED
    assert len(waiting) == 1
