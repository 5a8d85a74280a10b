"""What a replica does while the memory of its machine is short."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from core_bench import CoreBench, prompt
from large import large_but
from pressed_world import PressedWorld
from random_worlds import run_world
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.step import MemoryPressure

NUM_WORLDS = 14  # and more of them in `make acceptance`
HIGH, CRITICAL = MemoryPressure.HIGH, MemoryPressure.CRITICAL


def bench_of(num_sequences: int, *, preemption: PreemptionMode = PreemptionMode.AUTO, **shape: Any) -> CoreBench:
    """A replica with blocks in host memory, on which so many sequences of two blocks decode."""
    bench = CoreBench(preemption=preemption, **{"has_kv_in_host_memory": True, **shape})
    for number in range(num_sequences):
        bench.submit(f"{number}", prompt(7, 1000 * number), 40)
    bench.steps(2)
    return bench


def running(bench: CoreBench) -> list[Sequence]:
    return list(bench.replica.running)


def test_admission_waits_while_memory_is_short_and_goes_on_after_it() -> None:
    bench = bench_of(2)
    bench.replica.note_pressure(HIGH)
    (late,) = bench.submit("late", prompt(9, 5000), 5)
    for _ in range(3):
        bench.step()
    assert late.phase is Phase.QUEUED
    bench.replica.note_pressure(MemoryPressure.NONE)
    bench.step()
    assert late in running(bench)
    bench.run()


def test_one_sequence_runs_however_short_memory_is() -> None:
    bench = CoreBench(has_kv_in_host_memory=True)
    sequences = [bench.submit(f"{number}", prompt(9, 1000 * number), 3)[0] for number in range(3)]
    order = []
    while list(bench.scheduler.keys):
        bench.replica.note_pressure(CRITICAL)
        bench.step()
        assert len(running(bench)) <= 1
        order += [sequence for sequence in sequences if sequence.phase is Phase.ENDED and sequence not in order]
    assert order == sequences


def test_another_replica_takes_what_waits() -> None:
    bench = bench_of(2)
    other = bench.join(has_kv_in_host_memory=True)
    bench.replica.note_pressure(HIGH)
    (late,) = bench.submit("late", prompt(9, 5000), 5)
    bench.step()
    bench.step(at=other)
    assert other.holds(late)


def test_a_sequence_of_a_higher_class_preempts_nothing_while_it_cannot_be_admitted() -> None:
    bench = bench_of(2, max_sequences=2)
    bench.replica.note_pressure(HIGH)
    (urgent,) = bench.submit("urgent", prompt(9, 5000), 5, priority=5)
    bench.steps(3)
    assert urgent.phase is Phase.QUEUED
    assert len(running(bench)) == 2


def test_prompts_get_half_of_what_decodes_leave() -> None:
    bench = bench_of(4, max_step_tokens=64)
    (long,) = bench.submit("long", prompt(500, 9000), 5)
    plan = bench.step()
    assert {part.num_tokens for part in plan.scheduled if part.sequence is long} == {60}
    bench.replica.note_pressure(HIGH)
    plan = bench.step()
    assert {part.num_tokens for part in plan.scheduled if part.sequence is long} == {30}
    assert len(plan.scheduled) == 5


def test_a_budget_of_one_token_is_not_halved_to_nothing() -> None:
    bench = CoreBench(max_step_tokens=1, has_kv_in_host_memory=True)
    bench.submit("one", prompt(5), 2)
    bench.replica.note_pressure(CRITICAL)
    bench.run()


def test_free_blocks_are_discarded_once() -> None:
    bench = bench_of(2)
    used = {block_id for sequence in running(bench) for block_id in sequence.block_ids}
    bench.replica.note_pressure(HIGH)
    plan = bench.step()
    named = {block_id for part in plan.scheduled for block_id in part.sequence.block_ids}
    assert set(plan.discarded_block_ids) == set(range(256)) - used - named
    assert set(plan.discarded_host_block_ids) == set(range(64))
    bench.replica.note_pressure(HIGH)
    again = bench.step()
    assert again.discarded_block_ids == again.discarded_host_block_ids == []


def test_an_idle_replica_discards_its_blocks_and_then_rests() -> None:
    bench = CoreBench(has_kv_in_host_memory=True)
    assert bench.plan() is None
    bench.replica.note_pressure(CRITICAL)
    plan = bench.step()
    assert len(plan.discarded_block_ids) == 256
    bench.replica.note_pressure(CRITICAL)
    assert bench.plan() is None, "each step would lead to the next one"


def test_cached_blocks_are_evicted_in_parts_while_sequences_wait_and_all_where_it_is_critical() -> None:
    bench = CoreBench(num_blocks=80, has_kv_in_host_memory=True)
    for number in range(3):
        bench.submit(f"{number}", prompt(80, 1000 * number), 1)
    bench.run()
    bench.submit("runs", prompt(7, 9000), 60)
    bench.steps(2)
    cached = bench.replica.kv.device.counts.cached
    assert cached == 60
    bench.replica.note_pressure(HIGH)
    bench.step()
    assert bench.replica.kv.device.counts.cached == 60, "nothing waits"
    bench.submit("waits", prompt(7, 9500), 5)
    bench.replica.note_pressure(HIGH)
    plan = bench.step()
    assert bench.replica.kv.device.counts.cached == 50
    assert len(plan.discarded_block_ids) == 10
    bench.replica.note_pressure(CRITICAL)
    bench.step()
    assert bench.replica.kv.device.counts.cached == 0


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.AUTO])
def test_nothing_is_swapped_out_to_memory_that_is_short(mode: PreemptionMode) -> None:
    bench = bench_of(4, num_blocks=13, preemption=mode)
    bench.replica.note_pressure(HIGH)
    plans = []
    while bench.scheduler.totals.preemptions == 0:
        plans.append(bench.step())
    plans += bench.steps(2)
    assert bench.scheduler.totals.swaps == 0
    assert not any(plan.swap_out for plan in plans)


def test_what_is_swapped_out_gives_up_its_blocks_where_memory_is_critical() -> None:
    bench = bench_of(4, num_blocks=13, preemption=PreemptionMode.SWAP)
    while not bench.replica.swapped:
        bench.step()
    swapped = bench.replica.swapped[0]
    assert bench.replica.kv.host.counts.used
    bench.replica.note_pressure(CRITICAL)
    plan = bench.step()
    assert bench.replica.kv.host.counts.used == 0
    assert len(plan.discarded_host_block_ids) == 64
    assert swapped.phase is Phase.QUEUED
    bench.replica.note_pressure(MemoryPressure.NONE)
    bench.run()


def test_where_memory_stays_critical_all_but_one_sequence_are_preempted_one_by_one() -> None:
    bench = bench_of(4)
    counts = []
    for _ in range(5):
        bench.replica.note_pressure(CRITICAL)
        bench.step()
        counts.append(len(running(bench)))
    # The first measurement frees what is cached, where there is anything.
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    bench.replica.note_pressure(MemoryPressure.NONE)
    bench.run()


def test_on_a_gpu_no_block_is_freed() -> None:
    """Its blocks are one allocation."""
    bench = bench_of(3, has_kv_in_host_memory=False)
    for _ in range(3):
        bench.replica.note_pressure(CRITICAL)
        plan = bench.step()
        assert plan.discarded_block_ids == []
    assert len(running(bench)) == 3


@cache
def checked(seed: int) -> tuple[int, Counter[MemoryPressure]]:
    """Runs a world; returns how many sequences were preempted, and what was measured."""
    world = PressedWorld(seed, 1 + 3 * (seed % 3 == 0))
    return run_world(world, 500).counts["preemptions"], Counter(world.num_measured)


@pytest.mark.parametrize("seed", large_but(range(60), *range(NUM_WORLDS)))
def test_nothing_is_stuck_or_lost_however_short_memory_is(seed: int) -> None:
    """Every request ends with its right tokens, also if memory is critical all the time."""
    checked(seed)


def test_the_worlds_contain_what_they_are_to_check() -> None:
    worlds = [checked(seed) for seed in range(NUM_WORLDS)]
    measured = sum((levels for _, levels in worlds), Counter[MemoryPressure]())
    assert all(measured[level] > 200 for level in MemoryPressure)
    assert sum(preempted for preempted, _ in worlds) > 50
