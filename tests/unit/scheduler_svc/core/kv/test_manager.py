"""Swaps and forks while steps in flight still name the blocks."""

import pytest

from core_bench import BLOCK, TOKEN, CoreBench, prompt
from memory_worker import Drawn
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.step import StepOutcome


def running(bench: CoreBench, n: int = 1) -> list[Sequence]:
    """Sequences with two full blocks and two sampled tokens."""
    sequences = bench.submit("running", prompt(2 * BLOCK), 50, n=n)
    while sequences[-1].num_output < 2:
        bench.step()
    return sequences


def preempt_by_swap(bench: CoreBench, sequence: Sequence) -> None:
    assert bench.replica.kv.swap_out(sequence)
    bench.replica.leave(sequence, Phase.PREEMPTED)


@pytest.mark.parametrize("num_returned", [0, 1, 2])
def test_swapped_kv_has_the_tokens_that_the_last_step_returned(num_returned: int) -> None:
    bench = CoreBench(max_sampled_tokens=4)
    [sequence] = running(bench)
    bench.plan()
    preempt_by_swap(bench, sequence)
    bench.scheduler.commit(bench.replica, StepOutcome([Drawn([TOKEN] * num_returned)]), bench.now)
    assert sequence.phase is Phase.SWAPPED
    assert sequence.swapped_kv is not None
    assert sequence.swapped_kv.num_tokens == len(sequence.tokens) - 1


def test_kept_blocks_of_a_dropped_swap_stay_until_the_steps_in_flight_are_done() -> None:
    bench = CoreBench()
    first, second = running(bench, n=2)
    shared = first.block_ids[0]
    assert second.block_ids[0] == shared
    bench.plan()
    preempt_by_swap(bench, second)
    bench.scheduler.finish("running", 1, 2)
    assert second.phase is Phase.ENDED
    assert bench.replica.kv.device.pool.num_owners(shared) == 2
    bench.commit()
    assert bench.replica.kv.device.pool.num_owners(shared) == 1


def test_block_that_is_still_to_be_copied_is_not_swapped_out() -> None:
    bench = CoreBench()
    [parent] = running(bench)
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child, parent.num_committed)
    assert not bench.replica.kv.swap_out(child)
    bench.step()
    assert bench.replica.kv.swap_out(child)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_copy_in_flight_is_held_though_the_step_computes_nothing_of_its_sequence(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = CoreBench(num_host_blocks=0)
    [parent] = bench.submit("running", prompt(2 * BLOCK + 1), 50)
    bench.step()
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child, parent.num_committed)
    monkeypatch.setattr(Sequence, "is_plannable", property(lambda sequence: sequence is not child))
    plan = bench.plan()
    assert plan is not None
    assert [part.sequence for part in plan.scheduled] == [parent]
    copy, pool = child.block_ids[-1], bench.replica.kv.device.pool
    if is_kept:
        assert bench.replica.kv.keep([child])
        bench.replica.leave(child, Phase.PREEMPTED)
        bench.replica.kv.drop_swapped(child)
    else:
        bench.replica.leave(child, Phase.ENDED)
    assert not pool.is_free(copy)
    bench.commit()
    assert pool.is_free(copy)
