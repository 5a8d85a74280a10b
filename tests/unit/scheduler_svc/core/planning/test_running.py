"""Prompts that compete for blocks."""

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.request import Phase, Request, Sequence


def admitted(bench: CoreBench, number: int, num_tokens: int) -> Sequence:
    tokens = prompt(num_tokens, 1000 * number)
    sequence = Sequence(100 + number, Request(str(number), tokens, 1, 50, arrived_at=number), 0, number, tokens)
    bench.replica.admit(sequence, Hit([]))
    return sequence


def test_prompts_behind_one_that_lacks_blocks_take_none() -> None:
    bench = CoreBench(num_blocks=10, num_host_blocks=0)
    first, second = admitted(bench, 0, 8 * BLOCK), admitted(bench, 1, 2 * BLOCK)
    victim = admitted(bench, 2, 9 * BLOCK)
    bench.replica.kv.allocate(victim, 9)
    step = StepBuilder(bench.replica, bench.scheduler.limits)
    bench.scheduler._running.add_prompt_chunks(step)
    assert victim.phase is Phase.QUEUED, "it was preempted for the first one"
    assert bench.replica.running == [first, second]
    assert step.is_closed
    assert step.scheduled == []
    assert second.block_ids == []
