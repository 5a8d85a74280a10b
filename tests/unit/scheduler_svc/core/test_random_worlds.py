"""Random worlds of the scheduler: blocks and owners always agree, and every sequence gets its right tokens."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from memory_worker import MemoryWorker
from random_worlds import BudgetWorld, CrowdedWorld, LongPromptWorld, RandomWorld, run_world
from scheduler_svc.core.events import Failure
from scheduler_svc.core.kv.cache_reset import reset_prefix_cache

# `make acceptance` runs 5000 worlds, and checks with 100 that mutants of the core are detected.
NUM_WORLDS = int(os.environ.get("NUM_WORLDS", "40"))
NUM_ACTIONS = 1500  # in each; together 60,000

large = pytest.mark.large


@cache
def checked(seed: int) -> tuple[Counter[str], set[Failure]]:
    """Runs a world; returns counts of what happened in it, and why its requests failed."""
    world = run_world(RandomWorld(seed), NUM_ACTIONS)
    return world.counts, set(world.failed.values())


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_blocks_and_tokens_are_right(seed: int) -> None:
    checked(seed)


def test_random_worlds_contain_all_that_they_are_to_check() -> None:
    """Otherwise the test above would prove nothing of it."""
    counts: Counter[str] = Counter()
    failures: set[Failure] = set()
    for seed in range(NUM_WORLDS):
        counts.update(checked(seed)[0])
        failures |= checked(seed)[1]
    for what in (
        "preemptions",
        "swaps",
        "cache_hits",
        "host_hits",
        "blocks restored",
        "replicas drained",
        "versions superseded",
        "values CHUNKED",
        "values INDIVISIBLE",
        "values INDIVISIBLE_WITHOUT_KV",
        "values after a restart",
        "steps of one that is indivisible, above the budget",
        "steps of the indivisible alone",
        "steps of the indivisible beside others",
    ):
        assert counts[what] > 20, what
    assert counts["preemptions"] - counts["swaps"] > 20
    assert {Failure.DEADLINE_EXCEEDED, Failure.INTERNAL, Failure.QUARANTINED} <= failures


def test_worlds_whose_prefix_cache_is_reset() -> None:
    """Operators reset it at any time: blocks in use stay, and every sequence still gets its right tokens."""
    freed: Counter[str] = Counter()
    for seed in range(10):
        world = CrowdedWorld(3000 + seed)
        act = world.act

        def act_and_reset(world: CrowdedWorld = world, act: Callable[[], None] = act) -> None:
            act()
            for site in world.world.sites if world.rng.random() < 0.05 else ():
                reset = reset_prefix_cache(site.replica.kv)
                freed["device"] += reset.num_freed_device
                freed["host"] += reset.num_freed_host
                site.replica.check_integrity()

        world.act = act_and_reset  # type: ignore[method-assign]
        run_world(world, 500)
    assert freed["device"] > 20
    assert freed["host"] > 20


@pytest.mark.parametrize("seeds", [range(15, 37), pytest.param(range(40), marks=large)], ids=["some", "all"])
def test_worlds_of_few_prefixes_three_tenants_and_cancelled_swaps(seeds: Iterable[int]) -> None:
    """Hashes are published again after their blocks were evicted; no block is shared across salts."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_world(CrowdedWorld(seed, 1 + 3 * (seed % 4 == 0)), 800).counts)
    for what in (
        "hashes published again",
        "sequences with shared blocks",
        "cancelled while swapping in",
        "cancelled while swapping out",
        "host_hits",
        "swaps",
    ):
        assert counts[what] > 20, what


@pytest.mark.parametrize(("seed", "max_sampled_tokens"), [(283, 5), (856, 1), (2591, 6)])
def test_worlds_in_which_requests_got_stuck(seed: int, max_sampled_tokens: int) -> None:
    """A swapped beam did not fit beside its sibling; a step only preempted, and no other one was planned."""
    run_world(RandomWorld(seed) if seed == 856 else CrowdedWorld(seed, max_sampled_tokens), 400)


@pytest.mark.parametrize("max_sampled_tokens", [2, 4, 7])
def test_random_worlds_of_workers_that_speculate(max_sampled_tokens: int) -> None:
    """A step returns 0 to k tokens per sequence, and rejected tokens are never published."""
    counts: Counter[str] = Counter()
    returned: Counter[int] = Counter()
    for seed in range(NUM_WORLDS // 5):
        world = RandomWorld(1000 + seed, max_sampled_tokens)
        workers: dict[int, MemoryWorker] = {}
        for _ in range(1000):
            world.act()
            workers |= {id(site.worker): site.worker for site in world.world.sites}
        counts.update(run_world(world, 0).counts)
        for worker in workers.values():
            returned.update(worker.num_returned)
    assert all(returned[num_tokens] > 20 for num_tokens in range(max_sampled_tokens + 1))
    assert counts["swaps"] > 10
    assert counts["preemptions"] - counts["swaps"] > 20
    assert counts["blocks restored"] > 20


@pytest.mark.parametrize("max_sampled_tokens", [1, 4])
@pytest.mark.parametrize("seeds", [range(13), pytest.param(range(20), marks=large)], ids=["some", "all"])
def test_random_worlds_of_long_prompts(max_sampled_tokens: int, seeds: Iterable[int]) -> None:
    """Values are right, and each token of a prompt gets its log-probability once, although prompts are preempted."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_world(LongPromptWorld(seed, max_sampled_tokens), 1500).counts)
    for what in ("values CHUNKED", "values after a restart", "prompt log-probabilities computed again"):
        assert counts[what] > 10, what
    assert counts["preemptions"] > 10


@pytest.mark.parametrize("max_sampled_tokens", [1, 4])
@pytest.mark.parametrize("seeds", [(3, 4, 5, 6, 8, 9), pytest.param(range(12), marks=large)], ids=["some", "all"])
def test_random_worlds_of_accounts_with_a_limit_of_tokens(max_sampled_tokens: int, seeds: Iterable[int]) -> None:
    """Nothing is spent that is not leased, everything delivered is paid, and nothing is stuck once leases come."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_world(BudgetWorld(seed, max_sampled_tokens), 800).counts)
    for what in ("leases", "pauses", "unpaid", "paid values", "preemptions"):
        assert counts[what] > 20, what
