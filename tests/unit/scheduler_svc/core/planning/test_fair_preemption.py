"""Running sequences yield slots, blocks and step tokens to lower-served tenants and to higher classes."""

from collections import Counter
from functools import cache
from itertools import count
from typing import Any

import pytest

from core_bench import BLOCK, SHAPE, CopyMode, CoreBench, prompt
from large import large_but
from random_worlds import ContestedWorld, run_world
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.planning.claim import TURN_TOKENS
from scheduler_svc.core.planning.fair_preemption import MAX_TOGETHER
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionMode
from scheduler_svc.core.request import Phase, PreemptionMethod, Sequence

NUM_SLOTS = SHAPE.max_sequences
_starts = count(0, 10_000)


def flooded(
    policy: str = "fair", num_steps: int = 3 * MIN_STEPS, num_requests: int = 2 * NUM_SLOTS, **fields: Any
) -> CoreBench:
    """A tenant's long requests hold every slot; more of them wait."""
    bench = CoreBench(policy=policy, num_blocks=4000)
    for number in range(num_requests):
        bench.submit(f"flood-{number}", prompt(5, next(_starts)), 1000, tenant="flood", **fields)
    for _ in range(num_steps):
        advance(bench)
    return bench


def advance(bench: CoreBench, seconds: float = 0.05) -> None:
    bench.now += seconds
    bench.step()


def steps_until_token(bench: CoreBench, sequence: Sequence, most: int = 500) -> int:
    """Steps from now on until a sequence has its first token."""
    for number in range(1, most + 1):
        advance(bench)
        if sequence.num_output:
            return number
    raise AssertionError(f"no token within {most} steps")


def test_short_request_gets_a_slot_at_once_beside_a_tenant_that_holds_all() -> None:
    bench = flooded()
    [short] = bench.submit("short", prompt(3, next(_starts)), 3, tenant="other")
    assert steps_until_token(bench, short) <= 2


def test_short_requests_that_come_together_get_slots_together() -> None:
    bench = flooded()
    bench.submit("before", prompt(3, next(_starts)), 3, tenant="other")
    for _ in range(2 * MIN_STEPS):  # in which the flood is served more
        advance(bench)
    together = [bench.submit(f"short-{n}", prompt(3, next(_starts)), 3, tenant="other")[0] for n in range(MAX_TOGETHER)]
    advance(bench)
    assert [sequence.num_output for sequence in together] == [1] * MAX_TOGETHER
    assert bench.replica.num_slots_of["flood"] == NUM_SLOTS - MAX_TOGETHER


def test_no_more_slots_are_yielded_together_than_the_share() -> None:
    """Of the slots, the other tenant gets half, and the flood the others."""
    bench = flooded()
    for number in range(2 * NUM_SLOTS):
        bench.submit(f"long-{number}", prompt(3, next(_starts)), 200, tenant="other")
    for _ in range(12):
        advance(bench)
        assert bench.replica.num_slots_of["other"] <= NUM_SLOTS // 2
    assert bench.replica.num_slots_of["other"] == NUM_SLOTS // 2


@pytest.mark.parametrize("preemption", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_short_requests_find_blocks_beside_a_tenant_that_fills_them(preemption: PreemptionMode) -> None:
    """All but the first, after which blocks are kept free: preemption frees blocks only after some steps."""
    bench = CoreBench(policy="fair", preemption=preemption, num_blocks=320, num_host_blocks=2000)
    for number in range(3 * NUM_SLOTS):
        bench.submit(f"flood-{number}", prompt(40, next(_starts)), 1000, tenant="flood")
    waits = []
    for number in range(20):
        for _ in range(25):
            advance_ahead(bench)
        [short] = bench.submit(f"short-{number}", prompt(12, next(_starts)), 3, tenant="other")
        waits.append(next(n for n in count(1) if advance_ahead(bench) and short.num_output))
    assert bench.replica.kv.num_available < 40
    assert max(waits[1:]) <= 3, waits


def advance_ahead(bench: CoreBench) -> bool:
    """Plans a step while the one before is in flight, as the service does, and commits that one.

    A copy of blocks takes up to three steps. Always true.
    """
    bench.now += 0.05
    bench.plan()
    if len(bench.replica.steps_in_flight) > 1:
        bench.commit(CopyMode.DONE if bench.replica.num_steps % 4 == 0 else CopyMode.LATE)
    return True


def test_short_request_is_computed_beside_prompts_that_fill_every_step() -> None:
    """The prompts of the flood hold all slots and have computed nothing but the first chunk."""
    bench = CoreBench(policy="fair", num_blocks=8000)
    for number in range(70):
        bench.submit(f"flood-{number}", prompt(1200, next(_starts)), 1200, tenant="flood")
    advance(bench)
    [short] = bench.submit("short", prompt(3, next(_starts)), 3, tenant="other")
    assert steps_until_token(bench, short) <= 2


def test_long_prompt_gets_its_share_of_each_step_beside_a_flood_of_prompts() -> None:
    bench = CoreBench(policy="fair", num_blocks=8000)
    for number in range(70):
        bench.submit(f"flood-{number}", prompt(1200, next(_starts)), 1200, tenant="flood")
    advance(bench)
    [long] = bench.submit("long", prompt(640, next(_starts)), 3, tenant="other")
    assert steps_until_token(bench, long) <= 2 * 640 // SHAPE.max_step_tokens + 2


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_higher_class_takes_a_slot_from_a_lower_one_of_the_same_tenant(policy: str) -> None:
    """However long the lower class has run: only waiting raises a request."""
    bench = flooded(policy, num_requests=NUM_SLOTS, priority=-10)
    bench.now += 100.0
    [urgent] = bench.submit("urgent", prompt(3, next(_starts)), 3, tenant="flood", priority=10)
    assert steps_until_token(bench, urgent) <= 2


def test_first_come_first_served_takes_no_slot_away() -> None:
    bench = flooded("fcfs")
    bench.submit("urgent", prompt(3, next(_starts)), 3, tenant="other", priority=10)
    bench.steps(50)
    assert bench.scheduler.totals.preemptions == 0


def test_request_takes_no_slot_from_its_own_tenant() -> None:
    bench = flooded()
    bench.submit("more", prompt(3, next(_starts)), 3, tenant="flood")
    bench.steps(50)
    assert bench.scheduler.totals.preemptions == 0


def test_sequence_keeps_a_slot_for_its_first_steps() -> None:
    bench = flooded(num_steps=3)
    [short] = bench.submit("short", prompt(3, next(_starts)), 3, tenant="other")
    assert MIN_STEPS - 4 < steps_until_token(bench, short) <= MIN_STEPS + 2


def test_kv_of_a_sequence_without_a_slot_stays_on_the_device() -> None:
    bench = flooded()
    [short] = bench.submit("short", prompt(3, next(_starts)), 3, tenant="other")
    steps_until_token(bench, short)
    [kept] = bench.replica.swapped
    assert kept.last_preemption is not None
    assert kept.last_preemption.method is PreemptionMethod.KEEP
    num_known = len(kept.tokens)
    for _ in range(5):  # the request ends, and its slot is free; others of the tenant wait
        plan = bench.step()
        if len(kept.tokens) > num_known:
            break
    assert len(kept.tokens) == num_known + 1
    [part] = [part for part in plan.scheduled if part.sequence is kept]
    assert (part.start, part.num_tokens) == (num_known - 1, 1)
    assert not plan.swap_in


def test_two_floods_share_the_slots_by_weight_and_then_hold_them() -> None:
    bench = flooded()
    for number in range(NUM_SLOTS):
        bench.submit(f"other-{number}", prompt(5, next(_starts)), 1000, tenant="other", weight=3.0)
    for _ in range(4 * NUM_SLOTS):
        advance(bench)
    assert bench.replica.num_slots_of == {"flood": NUM_SLOTS // 4, "other": NUM_SLOTS * 3 // 4}
    before = bench.scheduler.totals.preemptions
    for _ in range(200):
        advance(bench)
    assert bench.replica.num_slots_of["other"] >= NUM_SLOTS * 3 // 4 - 1
    assert bench.scheduler.totals.preemptions - before < 200 * NUM_SLOTS / TURN_TOKENS


def test_tenants_take_turns_when_there_are_more_of_them_than_slots() -> None:
    bench = CoreBench(policy="fair", max_sequences=2, num_blocks=1000)
    sequences = [bench.submit(f"{name}", prompt(5, next(_starts)), 3000, tenant=f"{name}")[0] for name in range(6)]
    for _ in range(1500):
        advance(bench)
    served = [sequence.num_output for sequence in sequences]
    assert max(served) - min(served) <= 2 * (TURN_TOKENS + MIN_STEPS)


def test_sequence_without_a_slot_gets_its_turn_although_another_tenant_always_has_queued_ones() -> None:
    bench = CoreBench(policy="fair", max_sequences=1, num_blocks=500)
    [long] = bench.submit("long", prompt(5, next(_starts)), 1500, tenant="long")
    others = [bench.submit(f"{n}", prompt(5, next(_starts)), 150, tenant="other")[0] for n in range(10)]
    for _ in range(1000):
        advance(bench)
    assert abs(long.num_output - sum(one.num_output for one in others)) <= 2 * (TURN_TOKENS + MIN_STEPS)


def test_no_blocks_are_taken_from_a_tenant_that_has_been_served_less_than_those_that_wait() -> None:
    """It would come back before the sequence that took them, and so on without a token."""
    bench = CoreBench(policy="fair", num_blocks=40)
    [less] = bench.submit("less", prompt(100, next(_starts)), 59, tenant="less")
    [more] = bench.submit("more", prompt(4, next(_starts)), 40, tenant="more")
    for _ in range(MIN_STEPS + 2):
        advance(bench)
    bench.scheduler.waiting.policy.charge(more, 500)
    bench.scheduler.cancel("more")
    bench.submit("large", prompt(80, next(_starts)), 3, tenant="more")
    num_output = less.num_output
    for _ in range(20):
        advance(bench)
    assert less.num_output == num_output + 20


def test_blocks_are_taken_from_a_tenant_that_holds_more_of_them() -> None:
    bench = CoreBench(policy="fair", num_blocks=200, max_sequences=8)
    for number in range(8):
        bench.submit(f"flood-{number}", prompt(80, next(_starts)), 200, tenant="flood")
    for _ in range(2 * MIN_STEPS):
        advance(bench)
    assert bench.replica.kv.num_available < 60
    [large] = bench.submit("large", prompt(240, next(_starts)), 3, tenant="other")
    assert steps_until_token(bench, large) <= 40


def test_kept_blocks_are_given_up_before_a_running_sequence_is_preempted() -> None:
    bench = CoreBench(policy="fair", num_blocks=120, max_sequences=2)
    flood = [bench.submit(f"flood-{n}", prompt(40, next(_starts)), 400, tenant="flood")[0] for n in range(2)]
    for _ in range(2 * MIN_STEPS):
        advance(bench)
    [other] = bench.submit("other", prompt(8, next(_starts)), 300, tenant="other")
    while other.phase is Phase.QUEUED:
        advance(bench)
    [kept] = [one for one in flood if one.phase is Phase.SWAPPED]
    assert kept.swapped_kv is not None
    assert kept.swapped_kv.is_kept
    while kept.swapped_kv is not None and kept.swapped_kv.is_kept and kept.phase is Phase.SWAPPED:
        advance(bench)
    assert kept.num_preemptions >= 1
    bench.run()
    assert [one.num_output for one in (*flood, other)] == [400, 400, 300]


def test_second_flood_takes_half_of_the_slots_of_a_tenant_without_a_queue() -> None:
    bench = flooded(num_steps=400, num_requests=NUM_SLOTS)
    for number in range(NUM_SLOTS):
        bench.submit(f"other-{number}", prompt(5, next(_starts)), 1000, tenant="other")
    for _ in range(4 * NUM_SLOTS):
        advance(bench)
    assert abs(bench.replica.num_slots_of["flood"] - NUM_SLOTS // 2) <= 1


def test_no_more_kept_blocks_are_freed_than_are_missing() -> None:
    bench = CoreBench(policy="fair", num_blocks=200, max_sequences=2, num_host_blocks=0)
    flood = [bench.submit(f"flood-{n}", prompt(60, next(_starts)), 300, tenant="flood")[0] for n in range(2)]
    for _ in range(3 * MIN_STEPS):
        advance(bench)
    for name, num_tokens in (("short", 10), ("long", 300)):
        bench.submit(name, prompt(3, next(_starts)), num_tokens, tenant=name)
    while not all(one.phase is Phase.SWAPPED for one in flood):
        advance(bench)
    while bench.scheduler.is_live("short"):
        advance(bench)
    num_tokens = BLOCK * (bench.replica.kv.num_available + 5)
    [large] = bench.submit("large", prompt(num_tokens, next(_starts)), 3, tenant="large")
    while not large.num_output:
        advance(bench)
    assert sorted(one.num_preemptions for one in flood) == [1, 2], "one was preempted again, for its blocks"


def without_a_slot(bench: CoreBench, **fields: Any) -> Sequence:
    """A sequence that has yielded the only slot of a worker to another tenant's; its KV is kept there."""
    [first] = bench.submit("first", prompt(8, next(_starts)), 500, tenant="flood", **fields)
    for _ in range(2 * MIN_STEPS):
        advance(bench)
    [other] = bench.submit("other", prompt(8, next(_starts)), 500, tenant="other")
    while other.phase is not Phase.RUNNING:
        advance(bench)
    advance(bench)
    assert first.phase is Phase.SWAPPED
    return first


def test_sequence_without_a_slot_continues_on_a_worker_that_has_one() -> None:
    bench = CoreBench(policy="fair", max_sequences=1, num_blocks=4000)
    first = without_a_slot(bench)
    idle = bench.join(max_sequences=1, num_blocks=4000)
    num_output = first.num_output
    for _ in range(2):
        bench.step(at=idle)
    assert idle.running == [first]
    assert first.num_output > num_output


def test_sequence_keeps_its_kv_while_its_account_has_no_slot_for_it_anywhere() -> None:
    bench = CoreBench(policy="fair", max_sequences=1, num_blocks=4000)
    limits = AccountLimits("flood/", max_running=1)
    first = without_a_slot(bench, limits=limits)
    other_worker = bench.join(max_sequences=2, num_blocks=4000)
    # A request of the same priority would not go before the first one.
    [second] = bench.submit("second", prompt(8, next(_starts)), 500, priority=1, tenant="flood", limits=limits)
    for _ in range(3):
        bench.step(at=other_worker)
    assert other_worker.running == [second]
    assert first.phase is Phase.SWAPPED
    assert bench.replica.swapped == [first]


NUM_WORLDS = 15
USUAL_SEEDS = (1, 4, 5, 8, 12)  # worlds with many swaps, or many sequences that keep their KV


@cache
def checked(seed: int) -> Counter[str]:
    """Runs a contested world; returns counts of what happened in it."""
    return run_world(ContestedWorld(seed, 1 + 3 * (seed % 3 == 0)), 800).counts


@pytest.mark.parametrize("seed", large_but(range(NUM_WORLDS), *USUAL_SEEDS))
def test_blocks_and_tokens_are_right_in_contested_worlds(seed: int) -> None:
    checked(seed)


def test_contested_worlds_contain_what_they_are_to_check() -> None:
    counts = sum(map(checked, USUAL_SEEDS), Counter[str]())
    assert min(counts["keeps"], counts["swaps"]) > 20, counts


@pytest.mark.parametrize("num_host_blocks", [0, SHAPE.num_host_blocks])
def test_a_kept_sequence_counts_as_preempted_and_has_no_blocks_on_the_host(num_host_blocks: int) -> None:
    bench = CoreBench(policy="fair", max_sequences=2, num_host_blocks=num_host_blocks)
    for number in range(2):
        bench.submit(f"{number}", prompt(10, next(_starts)), 200, tenant="a")
    bench.steps(3 * MIN_STEPS)
    bench.submit("new", prompt(10, next(_starts)), 200, tenant="b")
    bench.steps(3)
    assert len(bench.replica.kept) == bench.scheduler.num_swapped == 1
    assert bench.scheduler.num_on_host == 0
