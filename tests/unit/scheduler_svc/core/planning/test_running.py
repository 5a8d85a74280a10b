"""Prompts that compete for blocks and for the time of steps."""

from typing import Any

import pytest

from core_bench import BLOCK, CoreBench, prompt, tokens_of
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.planning.new_request_reserve import RESERVE_SECONDS
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.policy.placement import num_owed_blocks
from scheduler_svc.core.request import Phase, Request, Sequence
from scheduler_svc.core.step import StepPlan


def admitted(bench: CoreBench, number: int, num_tokens: int, **request: Any) -> Sequence:
    tokens = prompt(num_tokens, 1000 * number)
    sequence = Sequence(
        100 + number, Request(str(number), tokens, 1, 50, arrived_at=number, **request), 0, number, tokens
    )
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


def flooded(num_slots: int = 8, num_prompts: int = 1, **shape: Any) -> CoreBench:
    """A tenant's jobs take all slots: most of them decode, and the prompts of the others are computed."""
    bench = CoreBench(policy="fair", max_sequences=num_slots, **shape)
    for number in range(num_slots - num_prompts):
        bench.submit(f"decode-{number}", prompt(3, 1000 * number), 100, tenant="jobs")
    bench.steps(20)
    for number in range(num_prompts):
        bench.submit(f"prompt-{number}", prompt(600, 10_000 + 1000 * number), 100, tenant="jobs")
    return bench


def num_prompt_tokens(plan: StepPlan) -> int:
    return sum(part.num_tokens for part in plan.scheduled if part.sequence.request.key.startswith("prompt"))


def test_steps_are_short_while_new_requests_of_a_small_tenant_come() -> None:
    bench = flooded(num_slots=32, num_blocks=1000, max_step_tokens=200)
    assert num_prompt_tokens(bench.step()) == 200 - 31
    bench.submit("chat", prompt(5, 90_000), 1, tenant="chats")
    plans = bench.steps(3)
    assert "chat" in tokens_of(plans[0])
    # 30 sequences decode. With the prompt a step may take 1.05 times the time of 31 tokens.
    assert [num_prompt_tokens(plan) for plan in plans[1:]] == [2, 2]
    bench.now += RESERVE_SECONDS + 1
    assert num_prompt_tokens(bench.step()) > 100


def test_steps_are_not_short_where_slots_are_free() -> None:
    bench = flooded(num_slots=32, num_prompts=2, num_blocks=1000, max_step_tokens=200)
    bench.step()
    assert bench.replica.num_slots == 31
    bench.submit("chat", prompt(5, 90_000), 1, tenant="chats")
    assert num_prompt_tokens(bench.step()) == 200 - 30 - 5


@pytest.mark.parametrize("num_decodes", [0, 1, 4])
def test_prompts_of_a_large_tenant_have_the_time_in_which_they_would_decode(num_decodes: int) -> None:
    bench = CoreBench(policy="fair", num_blocks=1000, max_step_tokens=200)
    jobs = [admitted(bench, number, 100) for number in range(8)]
    for job in jobs[:num_decodes]:
        bench.replica.kv.allocate(job, 25)
        job.num_computed = 99
    note_chat(bench)
    step = StepBuilder(bench.replica, bench.scheduler.limits)
    bench.scheduler._running.add_decodes(step)
    bench.scheduler._running.add_prompt_chunks(step)
    assert step.num_tokens == 9  # 8.4: any rest of the time is enough for one token


def test_steps_of_limited_prompts_alone_take_no_longer_where_a_step_costs_much() -> None:
    bench = CoreBench(policy="fair", num_blocks=1000, max_step_tokens=200)
    costs = bench.replica.costs
    for number in range(400):  # 50 ms and 1 ms for each token
        num_prefill, num_decodes = (number % 50, number % 7) if number % 3 else (0, 1 + number % 8)
        costs.observe_step(num_prefill, num_decodes, 0.05 + 0.001 * (num_prefill + num_decodes))
    assert costs.step_seconds(0, 0) == pytest.approx(0.05, rel=0.1)
    for number in range(8):
        admitted(bench, number, 100)
    note_chat(bench)
    step = StepBuilder(bench.replica, bench.scheduler.limits)
    bench.scheduler._running.add_decodes(step)
    bench.scheduler._running.add_prompt_chunks(step)
    assert costs.step_seconds(step.num_tokens, 0) <= 1.05 * costs.step_seconds(0, 8) + 0.0015


def test_prompts_of_higher_priority_than_new_requests_make_long_steps() -> None:
    bench = CoreBench(policy="fair", num_blocks=1000, max_step_tokens=200)
    low, high = admitted(bench, 0, 100), admitted(bench, 1, 100, priority=1)
    for number in range(2, 8):
        admitted(bench, number, 100)
    note_chat(bench)
    step = StepBuilder(bench.replica, bench.scheduler.limits)
    bench.scheduler._running.add_decodes(step)
    bench.scheduler._running.add_prompt_chunks(step)
    assert high.num_computed == 100
    assert low.num_computed == 7  # 1.05 times what seven decodes take


def note_chat(bench: CoreBench) -> None:
    """A new request of a tenant without slots came, which may preempt sequences."""
    request = Request("chat", prompt(5), 1, 1, tenant="chats")
    chat = Sequence(100, request, 0, 100, request.prompt)
    bench.scheduler.capacity.for_new_requests.note(bench.replica, chat, 2)


def test_a_new_request_of_a_small_tenant_takes_blocks_that_prompts_of_a_large_one_still_need() -> None:
    bench = flooded(num_prompts=4, num_blocks=180, max_step_tokens=20, num_host_blocks=0)
    bench.step()
    needed = sum(num_owed_blocks(bench.replica, sequence) for sequence in bench.replica.running)
    bench.submit("chat", prompt(9 * BLOCK, 90_000), 1, tenant="chats")
    assert 10 + needed > bench.replica.kv.num_available >= 10 + 16
    plan = bench.step()
    assert "chat" in tokens_of(plan)
    assert plan.preempted == []
