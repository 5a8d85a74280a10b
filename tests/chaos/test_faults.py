"""Schedules of faults."""

from collections import Counter
from itertools import islice, pairwise

from tests.chaos.faults import LINKS, ROLES, TO_LINKS, TO_ROLES, Fault, schedule


def make_schedule(seed: int, num_faults: int) -> list[Fault]:
    """The first ones."""
    return list(islice(schedule(seed), num_faults))


def test_a_seed_repeats_its_schedule() -> None:
    assert make_schedule(7, 50) == make_schedule(7, 50)
    assert make_schedule(7, 50) != make_schedule(8, 50)


def test_every_kind_of_fault_comes() -> None:
    kinds = Counter((fault.action, fault.place) for fault in make_schedule(1, 200))
    assert set(kinds) == {
        *((action, place) for place in ROLES for action in TO_ROLES),
        *((action, place) for place in LINKS for action in TO_LINKS),
    }


def test_one_in_ten_is_early_and_hits_the_same_place_never_two_in_a_row() -> None:
    faults = make_schedule(1, 2_000)
    assert 0.07 < sum(fault.is_early for fault in faults) / len(faults) < 0.13
    for before, after in pairwise(faults):
        assert not after.is_early or (after.place is before.place and not before.is_early)


def test_faults_of_links_have_their_trouble_and_are_over_in_time() -> None:
    for fault in make_schedule(1, 500):
        assert (fault.place in LINKS) == (fault.action in TO_LINKS)
        assert 0 <= fault.seconds <= 8
        assert 0 <= fault.pick < 1
