"""Prompts that compete for blocks and for the time of steps."""

from typing import Any

from core_bench import BLOCK, CoreBench, prompt, tokens_of
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.planning.new_request_reserve import RESERVE_SECONDS
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.policy.placement import num_owed_blocks
from scheduler_svc.core.request import Phase, Request, Sequence
from scheduler_svc.core.step import StepPlan


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


def flooded(num_slots: int = 8, **shape: Any) -> CoreBench:
    """A tenant's jobs take all slots: half of them decode, and the prompts of the others are computed."""
    bench = CoreBench(policy="fair", max_sequences=num_slots, **shape)
    for number in range(num_slots // 2):
        bench.submit(f"decode-{number}", prompt(3, 1000 * number), 100, tenant="jobs")
    bench.steps(20)
    for number in range(num_slots // 2):
        bench.submit(f"prompt-{number}", prompt(600, 10_000 + 1000 * number), 100, tenant="jobs")
    return bench


def num_prompt_tokens(plan: StepPlan) -> int:
    return sum(part.num_tokens for part in plan.scheduled if part.sequence.request.key.startswith("prompt"))


def test_steps_are_short_while_new_requests_of_a_small_tenant_come() -> None:
    bench = flooded(num_blocks=1000, max_step_tokens=200)
    assert num_prompt_tokens(bench.step()) == 196
    bench.submit("chat", prompt(5, 90_000), 1, tenant="chats")
    plans = bench.steps(3)
    assert "chat" in tokens_of(plans[0])
    # As many sequences wait for prompts as decode, or one less.
    assert all(0 < num_prompt_tokens(plan) <= 5 for plan in plans)
    bench.now += RESERVE_SECONDS + 1
    assert num_prompt_tokens(bench.step()) > 100


def test_a_new_request_of_a_small_tenant_takes_blocks_that_prompts_of_a_large_one_still_need() -> None:
    bench = flooded(num_blocks=180, max_step_tokens=20, num_host_blocks=0)
    bench.step()
    needed = sum(num_owed_blocks(bench.replica, sequence) for sequence in bench.replica.running)
    bench.submit("chat", prompt(9 * BLOCK, 90_000), 1, tenant="chats")
    assert 10 + needed > bench.replica.kv.num_available >= 10 + 16
    plan = bench.step()
    assert "chat" in tokens_of(plan)
    assert plan.preempted == []
