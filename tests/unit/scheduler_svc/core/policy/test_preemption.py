"""Which sequence is preempted, and whether it is swapped or recomputed."""

import math
from typing import Any

import pytest

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionMode, PreemptionPolicy
from scheduler_svc.core.request import PreemptionMethod, Sequence
from scheduler_svc.core.step import Direction


def preemption_of(bench: CoreBench, mode: PreemptionMode = PreemptionMode.AUTO) -> PreemptionPolicy:
    """A policy without an earlier order."""
    return PreemptionPolicy(bench.scheduler.waiting.policy, mode)


def running(bench: CoreBench, key: str, num_prompt: int = 8, **fields: Any) -> Sequence:
    """It has sampled a token."""
    start = 1000 * sum(map(ord, key))
    [sequence] = bench.submit(key, prompt(num_prompt, start), 500, **fields)
    bench.step()
    bench.now += 0.1
    return sequence


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_lower_class_is_preempted_first(policy: str) -> None:
    bench = CoreBench(policy=policy)
    low = running(bench, "low", num_prompt=30, priority=0)
    running(bench, "high", num_prompt=8, priority=1)
    assert preemption_of(bench).pick_victim(bench.replica, set()) is low


def test_larger_debt_is_preempted_first_within_a_class() -> None:
    bench = CoreBench(policy="fair")
    owing = running(bench, "owing", num_prompt=30, tenant="x")
    running(bench, "thrifty", num_prompt=8, tenant="y")
    assert bench.scheduler.waiting.policy.debt("x") > bench.scheduler.waiting.policy.debt("y")
    assert preemption_of(bench).pick_victim(bench.replica, set()) is owing


@pytest.mark.parametrize(("policy", "victim"), [("fair", "short"), ("fcfs", "middle")])
def test_fewest_own_blocks_are_preempted_first_unless_only_arrival_counts(policy: str, victim: str) -> None:
    bench = CoreBench(policy=policy)
    running(bench, "long", num_prompt=30)
    running(bench, "short", num_prompt=8)
    running(bench, "middle", num_prompt=20)
    chosen = preemption_of(bench).pick_victim(bench.replica, set())
    assert chosen is not None
    assert chosen.request.key == victim


def test_swap_is_probed_after_many_recomputations() -> None:
    bench = CoreBench(num_host_blocks=64)
    one = running(bench, "one", num_prompt=30)
    weighing = preemption_of(bench)
    for _ in range(20):
        bench.replica.costs.observe_swap(4, Direction.OUT, 0.02)
        bench.replica.costs.observe_swap(4, Direction.IN, 0.02)
    preemption = weighing.compare_costs(bench.replica, one)
    assert preemption.recompute_seconds < preemption.swap_seconds < 4 * preemption.recompute_seconds
    chosen = []
    for _ in range(130):
        choice = weighing.compare_costs(bench.replica, one).method
        weighing.record_method(bench.replica, choice)
        chosen.append(choice)
    assert chosen.count(PreemptionMethod.SWAP) == 2


def test_last_arrival_is_preempted_first_among_equals() -> None:
    bench = CoreBench()
    bench.submit("first", prompt(8), 50)
    [last] = bench.submit("last", prompt(8, 500), 50)
    bench.step()
    assert preemption_of(bench).pick_victim(bench.replica, set()) is last


def test_recently_admitted_sequence_is_not_preempted_before_its_minimum_of_steps() -> None:
    bench = CoreBench()
    old = running(bench, "old", num_prompt=30)
    bench.steps(MIN_STEPS)
    latest = running(bench, "new")
    while latest.num_steps < MIN_STEPS:
        assert preemption_of(bench).pick_victim(bench.replica, set()) is old
        bench.step()
    assert preemption_of(bench).pick_victim(bench.replica, set()) is latest


def test_recently_admitted_sequence_is_preempted_if_there_is_no_other() -> None:
    bench = CoreBench()
    first, last = running(bench, "first"), running(bench, "last")
    assert preemption_of(bench).pick_victim(bench.replica, {last.id}) is first
    assert preemption_of(bench).pick_victim(bench.replica, {first.id, last.id}) is None


@pytest.mark.parametrize(
    ("mode", "bytes_per_second", "choice"),
    [
        (PreemptionMode.AUTO, 1e8, PreemptionMethod.SWAP),
        (PreemptionMode.AUTO, 1e3, PreemptionMethod.RECOMPUTE),
        (PreemptionMode.SWAP, 1e3, PreemptionMethod.SWAP),
        (PreemptionMode.RECOMPUTE, 1e8, PreemptionMethod.RECOMPUTE),
    ],
)
def test_method_is_the_cheaper_one_or_the_configured_one(
    mode: PreemptionMode, bytes_per_second: float, choice: PreemptionMethod
) -> None:
    bench = CoreBench(swap_bytes_per_second=bytes_per_second)
    preemption = preemption_of(bench, mode).compare_costs(bench.replica, running(bench, "a", num_prompt=10 * BLOCK))
    assert preemption.method is choice
    assert preemption.swap_seconds == pytest.approx(2 * 10 * bench.replica.shape.block_bytes / bytes_per_second)
    assert preemption.recompute_seconds == pytest.approx(10 * BLOCK / bench.replica.shape.prefill_tokens_per_second)


def test_shared_blocks_cost_nothing() -> None:
    bench = CoreBench()
    sequences = bench.submit("a", prompt(10 * BLOCK), 50, n=2)
    while not all(sequence.num_output for sequence in sequences):
        bench.step()
    alone = CoreBench()
    preemption = preemption_of(bench).compare_costs(bench.replica, sequences[1])
    own = sequences[1].num_computed - 10 * BLOCK
    assert preemption.recompute_seconds == pytest.approx(alone.replica.costs.recompute_seconds(own))
    assert preemption.swap_seconds <= alone.replica.costs.swap_seconds(1, 1)


def test_everything_is_recomputed_without_host_blocks() -> None:
    bench = CoreBench(num_host_blocks=0)
    preemption = preemption_of(bench, PreemptionMode.SWAP).compare_costs(bench.replica, running(bench, "a"))
    assert (preemption.method, preemption.swap_seconds) == (PreemptionMethod.RECOMPUTE, math.inf)


def test_sequence_that_would_be_recomputed_is_not_preempted_early() -> None:
    for mode, expected in ((PreemptionMode.SWAP, True), (PreemptionMode.RECOMPUTE, False)):
        bench = CoreBench()
        running(bench, "a")
        running(bench, "b")
        assert not preemption_of(bench, mode).should_swap_early(bench.replica), "they have only just come"
        bench.steps(MIN_STEPS)
        assert preemption_of(bench, mode).should_swap_early(bench.replica) is expected
