"""Schedules of faults."""

from collections import Counter
from itertools import islice, pairwise

from tests.chaos.faults import LINK_ACTIONS, LINKS, ROLE_ACTIONS, ROLES, Fault, schedule


def make_schedule(seed: int, num_faults: int) -> list[Fault]:
    """The first `num_faults` faults."""
    return list(islice(schedule(seed), num_faults))


def test_a_seed_repeats_its_schedule() -> None:
    assert make_schedule(7, 50) == make_schedule(7, 50)
    assert make_schedule(7, 50) != make_schedule(8, 50)


def test_every_kind_of_fault_occurs() -> None:
    kinds = Counter((fault.action, fault.target) for fault in make_schedule(1, 200))
    assert set(kinds) == {
        *((action, target) for target in ROLES for action in ROLE_ACTIONS),
        *((action, target) for target in LINKS for action in LINK_ACTIONS),
    }


def test_one_in_ten_overlaps_with_the_same_target_and_never_two_in_a_row() -> None:
    faults = make_schedule(1, 2_000)
    assert 0.07 < sum(fault.is_overlapping for fault in faults) / len(faults) < 0.13
    for before, after in pairwise(faults):
        assert not after.is_overlapping or (after.target is before.target and not before.is_overlapping)


def test_targets_fit_actions_and_no_fault_exceeds_8_s() -> None:
    for fault in make_schedule(1, 500):
        assert (fault.target in LINKS) == (fault.action in LINK_ACTIONS)
        assert 0 <= fault.seconds <= 8
        assert 0 <= fault.pick < 1
