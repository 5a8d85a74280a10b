"""Planning of steps: limits on prompts, preemption, resumption, waiting for prefixes."""

from itertools import chain, pairwise
from typing import Any

import pytest

from core_bench import BLOCK, CoreBench, keys, prompt, tokens_of
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.step_builder import LONG_PROMPT
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR, Phase, Sequence
from scheduler_svc.core.step import StepPlan

TOLERANCE = 1.1  # learned costs are a little off


def seconds_of(plan: StepPlan) -> float:
    """The duration of a step on a worker of these tests, in seconds."""
    num_decodes = sum(part.num_tokens == 1 for part in plan.scheduled)
    return 0.02 + 1e-4 * (plan.num_tokens - num_decodes) + 5e-4 * num_decodes


def timed_step(bench: CoreBench) -> StepPlan:
    plan = bench.plan()
    assert plan is not None
    bench.commit(busy_seconds=seconds_of(plan))
    return plan


def with_decodes(count: int, **shape: int) -> CoreBench:
    """A bench with this many decoding sequences and learned costs of steps."""
    usual: dict[str, Any] = {"block_size": 16, "num_blocks": 1500, "max_step_tokens": 2048, "max_sequences": 64}
    bench = CoreBench(**usual | shape)
    for place in range(count):
        bench.submit(f"decode {place}", prompt(100 + place, 1000 * place), 1000)
        timed_step(bench)
    for _ in range(40):
        timed_step(bench)
    return bench


# Long prompts together with decodes.


def test_long_prompt_is_limited_by_the_gap_factor_beside_decodes() -> None:
    bench = with_decodes(8)
    usual = seconds_of(timed_step(bench))
    [long] = bench.submit("long", prompt(3000, 100_000), 4)
    num_steps = 0
    while long.num_output == 0:
        costs = bench.replica.costs
        most = TOLERANCE * SchedulerLimits().gap_factor * costs.step_seconds(0, 8)
        plan = bench.plan()
        assert plan is not None
        assert costs.step_seconds(tokens_of(plan)["long"], 8) <= most
        bench.commit(busy_seconds=seconds_of(plan))
        num_steps += 1
        assert seconds_of(plan) <= TOLERANCE * SchedulerLimits().gap_factor * usual
        assert len(keys(plan)) == 9, "every decode is in each step"
    assert 3000 / num_steps > 2 * bench.replica.shape.block_size, "it is not held back more than that asks for"


def test_long_prompt_without_decodes_takes_whole_steps() -> None:
    bench = CoreBench(num_blocks=4000, max_step_tokens=2048)
    bench.submit("long", prompt(6000), 1)
    assert [plan.num_tokens for plan in bench.steps(3)] == [2048, 2048, 6000 - 2 * 2048]


def test_short_prompt_is_not_limited_beside_decodes() -> None:
    bench = with_decodes(8)
    bench.submit("short", prompt(LONG_PROMPT - 1, 100_000), 4)
    assert tokens_of(timed_step(bench))["short"] == LONG_PROMPT - 1


def test_several_long_prompts_share_what_brings_their_tokens_in_time() -> None:
    steps = []
    for count in (1, 2, 3):
        bench = with_decodes(8)
        usual = seconds_of(timed_step(bench))
        for place in range(count):
            bench.submit(f"long {place}", prompt(3000, 100_000 * (place + 1)), 4)
        bench.step()  # they are admitted
        steps.append(timed_step(bench))
        factor = max(SchedulerLimits().gap_factor, 1 / (1 - count / FIRST_TOKEN_FACTOR))
        assert seconds_of(steps[-1]) <= TOLERANCE * factor * usual
    one, two, three = (step.num_tokens for step in steps)
    assert 1.5 * one < two < three / 1.5


def test_a_long_prompt_that_is_late_is_not_limited() -> None:
    bench = with_decodes(8, max_step_tokens=512)
    bench.submit("long", prompt(3000, 100_000), 4)
    assert bench.step().num_tokens < 100
    bench.now += 20.0
    assert bench.step().num_tokens == 512


def test_a_long_prompt_that_waited_in_the_queue_is_not_late() -> None:
    bench = with_decodes(8, max_step_tokens=512)
    bench.submit("long", prompt(3000, 100_000), 4)
    bench.now += 20.0
    assert max(step.num_tokens for step in bench.steps(3)) < 100


# More tokens than usual beside decodes that take long.


def prompts_beside(count: int, usual: int, most: int = 2048) -> tuple[CoreBench, StepPlan]:
    """A step with more prompts than it takes, beside this many decodes; not yet computed."""
    bench = with_decodes(count, usual_step_tokens=usual, max_step_tokens=most, num_blocks=4000)
    while sum(sequence.is_decode for sequence in bench.replica.running) < count:
        timed_step(bench)
    for _ in range(400):
        timed_step(bench)  # of decodes alone: prompts have taken little of the last steps' time
    for place in range(20):
        bench.submit(f"new {place}", prompt(150, 100_000 + 1000 * place), 4)
    plan = bench.plan()
    assert plan is not None
    return bench, plan


@pytest.mark.parametrize("count", [1, 8, 40])
def test_prompts_take_twice_as_long_as_the_decodes(count: int) -> None:
    bench, plan = prompts_beside(count, usual=32)
    costs = bench.replica.costs
    most = 2 * costs.step_seconds(0, count)
    assert most / TOLERANCE <= costs.recompute_seconds(plan.num_tokens - count) <= most
    assert all(f"decode {place}" in tokens_of(plan) for place in range(count)), "every decode is in each step"


@pytest.mark.parametrize(
    ("count", "usual", "most", "expected"),
    [(19, 2000, 2048, 2000), (20, 2000, 2048, 1000), (40, 64, 200, 200), (19, 300, 300, 300), (40, 300, 300, 300)],
)
def test_a_step_has_the_usual_tokens_or_half_of_them_if_as_many_sequences_decode_as_wait_and_those_that_fit_at_most(
    count: int, usual: int, most: int, expected: int
) -> None:
    _, plan = prompts_beside(count, usual, most)  # 20 of them
    assert plan.num_tokens == expected


def test_a_step_is_half_as_large_once_most_sequences_decode() -> None:
    bench = with_decodes(1, usual_step_tokens=1200)
    for place in range(2):
        bench.submit(f"new {place}", prompt(1000, 100_000 + 1000 * place), 4)
    assert [timed_step(bench).num_tokens for _ in range(2)] == [1200, 600], "one prompt ends with the first step"


def test_queued_prompts_count_once_for_each_worker_that_admits_some() -> None:
    sizes = []
    for retired in (True, False):
        bench = with_decodes(3, usual_step_tokens=1200)
        bench.join(block_size=16, num_blocks=1500, max_sequences=64).is_retired = retired
        for place in range(6):
            bench.submit(f"new {place}", prompt(1000, 100_000 + 1000 * place), 4)
        sizes.append(timed_step(bench).num_tokens)
    assert sizes == [1200, 600], "six for one worker, three for each of two"


def test_prompts_do_not_queue_up_though_they_take_most_of_the_time() -> None:
    shape = {"usual_step_tokens": 32, "max_step_tokens": 8192, "num_blocks": 8000}
    bench = with_decodes(40, **shape, prefill_tokens_per_second=10_000)
    sequences, owed = list[Sequence](), 0.0
    for _ in range(100):
        owed += 3 / 4 * seconds_of(timed_step(bench)) / 1e-4  # tokens of prompts that take three quarters of the time
        while owed >= 150:
            sequences += bench.submit(f"new {len(sequences)}", prompt(150, 100_000 + 1000 * len(sequences)), 1)
            owed -= 150
    assert sum(sequence.num_output == 0 for sequence in sequences) <= 16, "eight come in a step"


def test_without_decodes_a_step_has_the_usual_tokens() -> None:
    bench = CoreBench(num_blocks=4000, max_step_tokens=2048, usual_step_tokens=256)
    bench.submit("a", prompt(600), 1)
    assert [plan.num_tokens for plan in bench.steps(3)] == [256, 256, 600 - 2 * 256]


def test_beside_a_few_decodes_a_load_of_prompts_makes_no_step_longer_than_usual() -> None:
    bench = with_decodes(2, usual_step_tokens=1100, max_step_tokens=4096, num_blocks=8000)
    for place in range(200):  # prompts wait at all times
        bench.submit(f"new {place}", prompt(900, 100_000 + 1000 * place), 1)
    steps = [timed_step(bench) for _ in range(150)]
    assert bench.replica.costs.prompt_factor > 4
    assert max(step.num_tokens for step in steps) == 1100


# Budgets.


def test_more_decodes_than_a_step_holds_take_turns() -> None:
    bench = CoreBench(max_step_tokens=2)
    names = "abcde"
    sequences = [bench.submit(name, prompt(2, 100 * i), 200, has_stop_strings=True)[0] for i, name in enumerate(names)]
    while bench.plan() is not None:
        bench.commit()  # until all are as far ahead as their gateway allows
    before = [sequence.num_output for sequence in sequences]
    assert min(before) > 0
    for name in names:
        bench.scheduler.acknowledge(name, 0, 100)
    bench.steps(50)
    grown = [sequence.num_output - start for sequence, start in zip(sequences, before, strict=True)]
    assert sum(grown) == 100
    assert max(grown) - min(grown) <= 2


def test_sequences_with_the_same_first_block_are_neighbours() -> None:
    bench = CoreBench(max_sequences=32)
    for place in range(3):
        for name in "abc":
            first = 10_000 * ord(name)
            bench.submit(f"{name}{place}", [*prompt(2 * BLOCK, first), *prompt(3, first + 100 * (place + 1))], 50)
    groups = [key[0] for key in keys(bench.steps(4)[-1])]
    assert len(groups) == 9
    assert sum(left != right for left, right in pairwise(groups)) == 2


# Preemption.


def crowd(bench: CoreBench, count: int = 4) -> list[Sequence]:
    """Sequences that together need more blocks than exist."""
    return [bench.submit(f"{place}", prompt(8, 1000 * place), 60)[0] for place in range(count)]


def test_swap_begins_before_blocks_run_out() -> None:
    bench = CoreBench(num_blocks=30, preemption=PreemptionMode.SWAP)
    crowd(bench)
    while True:
        num_running = len(bench.replica.running)
        plan = bench.step()
        if plan.preempted:
            break
    assert len(plan.scheduled) == num_running - 1, "only the victim waits"
    assert bench.num_used < bench.replica.shape.num_blocks
    assert len(plan.swap_out) > 0


def test_recomputed_victim_leaves_only_when_blocks_have_run_out() -> None:
    bench = CoreBench(num_blocks=30, preemption=PreemptionMode.RECOMPUTE)
    crowd(bench)
    while True:
        num_available = bench.replica.kv.num_available
        need = sum(len(s.block_ids) * BLOCK <= s.num_computed for s in bench.replica.running)
        if bench.step().preempted:
            break
    assert need > num_available


def test_nothing_is_computed_twice_if_victims_are_swapped() -> None:
    bench = CoreBench(num_blocks=30, preemption=PreemptionMode.SWAP)
    sequences = crowd(bench)
    bench.run()
    assert bench.scheduler.totals.swaps > 0
    assert bench.scheduler.totals.swaps == bench.scheduler.totals.preemptions
    assert [sequence.num_output for sequence in sequences] == [60] * 4
    assert bench.num_computed == 4 * (8 + 60 - 1)


def test_swapped_sequence_is_resumed_before_queued_ones_of_its_class() -> None:
    bench = CoreBench(num_blocks=30, preemption=PreemptionMode.SWAP)
    crowd(bench)
    while not bench.replica.swapped:
        bench.step()
    [victim] = bench.replica.swapped
    [queued] = bench.submit("queued", prompt(4, 50_000), 4)
    while victim.phase is Phase.SWAPPED:
        assert queued.phase is Phase.QUEUED
        bench.step()
    assert victim.num_output < 60


def test_preempted_sequence_records_both_costs() -> None:
    bench = CoreBench(num_blocks=30)
    crowd(bench)
    while not (preempted := bench.step().preempted):
        pass
    preemption = preempted[0].last_preemption
    assert preemption is not None
    assert 0 < preemption.swap_seconds < preemption.recompute_seconds
    assert preempted[0].num_preemptions == 1


def test_lone_sequence_that_fills_all_memory_is_never_preempted() -> None:
    bench = CoreBench(num_blocks=8)
    bench.submit("a", prompt(BLOCK), 7 * BLOCK)
    bench.run()
    assert bench.scheduler.totals.preemptions == 0


def test_admitted_sequence_leaves_a_reserve_to_running_ones() -> None:
    bench = CoreBench(num_blocks=12)
    bench.submit("a", prompt(2 * BLOCK), 30)
    bench.steps(2)
    [queued] = bench.submit("b", prompt(9 * BLOCK, 500), 1)
    assert bench.replica.kv.num_needed(queued, bench.replica.kv.match(queued)) == 9
    assert bench.replica.kv.num_available == 9
    while bench.scheduler.is_live("a"):
        assert keys(bench.step()) == ["a"]
    assert keys(bench.step()) == ["b"]
    assert bench.scheduler.totals.preemptions == 0


# Shared prefixes.


def test_queued_sequence_waits_for_the_prefix_that_another_one_computes() -> None:
    bench = CoreBench()
    shared = prompt(6 * BLOCK)
    bench.submit("producer", [*shared, 1], 4)
    [waiter] = bench.submit("waiter", [*shared, 2], 4)
    plan = bench.plan()
    assert plan is not None
    assert keys(plan) == ["producer"]
    assert waiter.phase is Phase.WAITING_FOR_PREFIX
    bench.run()
    assert bench.num_computed == len(shared) + 2 * (1 + 4 - 1)


def test_waiter_of_a_cancelled_producer_computes_the_prefix_itself() -> None:
    bench = CoreBench()
    shared = prompt(6 * BLOCK)
    bench.submit("producer", [*shared, 1], 4)
    [waiter] = bench.submit("waiter", [*shared, 2], 4)
    bench.plan()
    bench.scheduler.cancel("producer")
    plan = bench.plan()
    assert plan is not None
    [part] = plan.scheduled
    assert (part.sequence, part.start, part.num_tokens) == (waiter, 0, len(shared) + 1)


def test_waiter_of_a_preempted_producer_is_released() -> None:
    bench = CoreBench(policy="priority", preemption=PreemptionMode.RECOMPUTE, num_blocks=290)
    for place in range(3):
        bench.submit(f"decode {place}", prompt(2 * BLOCK, 5000 + 100 * place), 400, priority=1)
    bench.step()
    shared = prompt(LONG_PROMPT, 50_000)  # held back, so that it is not done soon
    [producer] = bench.submit("producer", [*shared, 1], 4)
    [waiter] = bench.submit("waiter", [*shared, 2], 4)
    bench.step()
    while not producer.num_preemptions:
        assert waiter.phase is Phase.WAITING_FOR_PREFIX
        bench.plan()
        if not producer.num_preemptions:
            bench.commit()
    assert bench.scheduler.waiting.prefix_waiters.producer_of(waiter) is not producer


# New sequences in the message of a step.


def test_new_sequences_whose_tokens_do_not_fit_into_one_message_come_in_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_svc.core.planning.step_builder.MAX_NEW_TOKENS", 100)
    bench = CoreBench(max_step_tokens=1000)
    bench.submit("shared", prompt(41), 6, n=6)  # all but the first find the prompt cached
    bench.submit("large", prompt(120, 1000), 6)  # alone it fits however long it is
    bench.submit("small", prompt(10, 2000), 6)
    sizes = []
    while bench.scheduler.num_queued or bench.replica.num_running:
        sizes.append([len(new.tokens) for new in bench.step().new_sequences])
    assert all(sum(each) <= 100 or len(each) == 1 for each in sizes)
    assert sorted(chain.from_iterable(sizes)) == [10, *[41] * 6, 120]
    assert len([each for each in sizes if each]) <= 6
