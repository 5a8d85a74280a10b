"""Random worlds of the scheduler: blocks and owners always agree, and every sequence gets its right tokens."""

from collections import Counter

import pytest

from memory_worker import MemoryWorker
from random_worlds import BudgetWorld, CrowdedWorld, LongPromptWorld, RandomWorld, run_world
from scheduler_svc.core.events import Failure

NUM_WORLDS = 100
NUM_ACTIONS = 2000  # in each; together 200,000


def test_random_worlds_contain_all_that_they_are_to_check() -> None:
    """Otherwise the test below would prove nothing of it."""
    counts: Counter[str] = Counter()
    failures: set[Failure] = set()
    for seed in range(60):
        world = RandomWorld(seed)
        for _ in range(1500):
            world.act()
        counts.update(world.world.counts)
        failures |= set(world.world.failed.values())
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


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_blocks_and_tokens_are_right(seed: int) -> None:
    run_world(RandomWorld(seed), NUM_ACTIONS)


def test_worlds_of_few_prefixes_three_tenants_and_cancelled_swaps() -> None:
    """Hashes are published again after their blocks were evicted; no block is shared across salts."""
    counts: Counter[str] = Counter()
    for seed in range(40):
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
    for seed in range(NUM_WORLDS // 2):
        world = RandomWorld(1000 + seed, max_sampled_tokens)
        workers: dict[int, MemoryWorker] = {}
        for _ in range(NUM_ACTIONS // 2):
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
def test_random_worlds_of_long_prompts(max_sampled_tokens: int) -> None:
    """Values are right, and each token of a prompt gets its log-probability once, although prompts are preempted."""
    counts: Counter[str] = Counter()
    for seed in range(20):
        counts.update(run_world(LongPromptWorld(seed, max_sampled_tokens), 1500).counts)
    for what in ("values CHUNKED", "values after a restart", "prompt log-probabilities computed again"):
        assert counts[what] > 10, what
    assert counts["preemptions"] > 10


@pytest.mark.parametrize("max_sampled_tokens", [1, 4])
def test_random_worlds_of_accounts_with_a_limit_of_tokens(max_sampled_tokens: int) -> None:
    """Nothing is spent that is not leased, everything delivered is paid, and nothing is stuck once leases come."""
    counts: Counter[str] = Counter()
    for seed in range(12):
        counts.update(run_world(BudgetWorld(seed, max_sampled_tokens), 800).counts)
    for what in ("leases", "pauses", "unpaid", "paid values", "preemptions"):
        assert counts[what] > 20, what
