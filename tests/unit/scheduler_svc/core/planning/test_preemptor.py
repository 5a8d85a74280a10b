"""Preemption when nothing else frees blocks."""

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.request import Phase, Sequence


def swapped_out(bench: CoreBench, key: str, start: int) -> Sequence:
    """A sequence that waits on the replica with its KV on the host."""
    [sequence] = bench.submit(key, prompt(4 * BLOCK, start), 50)
    while sequence.num_output < 1:
        bench.step()
    assert bench.replica.kv.swap_out(sequence)
    bench.replica.leave(sequence, Phase.PREEMPTED)
    bench.replica.keep_swapped(sequence)
    bench.plan()
    bench.commit()
    return sequence


def test_swapped_head_of_the_queue_keeps_its_kv_while_others_are_paused() -> None:
    """They continue and end when a gateway has searched their tokens for stop strings."""
    bench = CoreBench()
    head = swapped_out(bench, "head", 0)
    assert bench.replica.swapped == [head]
    assert not bench.scheduler._preemptor.clear_deadlock(bench.replica, head)
    assert bench.replica.swapped == [head]
    bench.run()
    assert head.num_output == 50
