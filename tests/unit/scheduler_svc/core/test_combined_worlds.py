"""Random worlds in which all limits, classes, deadlines, kinds of results and losses come together."""

from collections import Counter
from collections.abc import Iterable

import pytest

from combined_world import CombinedWorld, check_is_empty
from random_worlds import run_world
from scheduler_svc.core.events import Failure


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(60), marks=pytest.mark.large)], ids=["some", "all"])
def test_each_request_ends_once_and_nothing_of_it_is_remembered(seeds: Iterable[int]) -> None:
    counts: Counter[str] = Counter()
    failures: Counter[Failure] = Counter()
    for seed in seeds:
        world = run_world(CombinedWorld(seed, (1, 1, 4, 7)[seed % 4]), 1000)
        check_is_empty(world.scheduler)
        late = [key for key, reason in world.failed.items() if reason is Failure.DEADLINE_EXCEEDED]
        assert all((world.requests[key].deadline or world.now) < world.now for key in late)
        counts.update(world.counts)
        failures.update(world.failed.values())
    for what in ("preemptions", "pauses", "unpaid", "cache_hits", "blocks restored", "replicas drained"):
        assert counts[what] > 2, what
    assert {Failure.CANCELLED, Failure.DEADLINE_EXCEEDED, Failure.CONTEXT_LENGTH_EXCEEDED} <= failures.keys()


def test_world_in_which_two_searches_took_the_slots_of_each_other() -> None:
    """One had the higher priority; the other had risen to its class, and its tenant was served less. The memory of the
    worker's machine was short, so each lost its blocks with its slots.
    """
    run_world(CombinedWorld(257), 1000)
