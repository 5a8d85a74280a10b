"""A beam search gets and gives up the slots and blocks of all its beams together, and waits as one entry."""

from itertools import count
from typing import Any

import pytest

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.events import Event, Failure, TokensEvent
from scheduler_svc.core.planning.claim import TURN_TOKENS
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionMode
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, PreemptionMethod, Sequence

WIDTH = 4
PROMPT = prompt(2 * BLOCK + 1)
_starts = count(10_000, 10_000)


def submit_search(bench: CoreBench, max_tokens: int = 60, width: int = WIDTH, **fields: Any) -> list[Sequence]:
    """The live sequences of the search, in a list that follows them."""
    beam = BeamParams(width, 1.0, EarlyStopping.NEVER)
    [first] = bench.submit("search", PROMPT, max_tokens, beam=beam, **fields)
    return first.siblings


def running_search(bench: CoreBench, num_steps: int = MIN_STEPS + 2, **fields: Any) -> list[Sequence]:
    """A search that has run for some steps, with all its beams."""
    beams = submit_search(bench, **fields)
    for _ in range(num_steps):
        advance(bench)
    assert [beam.phase for beam in beams] == [Phase.RUNNING] * len(beams)
    return beams


def advance(bench: CoreBench, at: Replica | None = None) -> list[Event]:
    """One step."""
    bench.now += 0.05
    assert bench.plan(at) is not None, "there is nothing to do"
    return bench.commit(at=at)


def found_in(events: list[Event]) -> list[list[int]]:
    return [list(event.token_ids) for event in events if isinstance(event, TokensEvent) and event.score is not None]


def run(bench: CoreBench) -> list[list[int]]:
    """Runs until no request is live; returns what the search has found."""
    return found_in(bench.run())


def undisturbed(max_tokens: int = 60, width: int = WIDTH) -> list[list[int]]:
    bench = CoreBench(num_blocks=4000)
    submit_search(bench, max_tokens, width)
    return run(bench)


def test_beams_are_older_than_the_requests_that_came_after_their_search() -> None:
    """By their ids: a worker that lacks memory for a step leaves out the sequence with the largest one."""
    bench = CoreBench(num_blocks=4000)
    beams = running_search(bench)
    [other] = bench.submit("other", prompt(3, next(_starts)), 40)
    before = {beam.id for beam in beams}
    for _ in range(10):
        advance(bench)
        assert max(beam.id for beam in beams) < other.id
    assert all(beam.id not in before for beam in beams)
    assert len({other.id, *(beam.id for beam in beams)}) == len(beams) + 1


# Slots.


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_search_is_admitted_when_there_are_slots_for_all_its_beams(policy: str) -> None:
    bench = CoreBench(policy=policy, max_sequences=WIDTH + 1, num_blocks=4000)
    for number in range(2):
        bench.submit(f"{number}", prompt(5, next(_starts)), 10 + 10 * number)
    advance(bench)
    beams = submit_search(bench)
    while bench.scheduler.is_live("0"):
        assert [beam.phase for beam in beams] == [Phase.QUEUED]
        advance(bench)
    advance(bench)
    assert [beam.phase for beam in beams] == [Phase.RUNNING]
    assert bench.replica.num_slots_of == {"default": WIDTH + 1}, "slots are kept for the beams that are to come"
    assert run(bench) == undisturbed()


def test_search_yields_all_its_slots_to_another_tenant_and_gets_them_back_together() -> None:
    bench = CoreBench(policy="fair", max_sequences=WIDTH, num_blocks=4000)
    beams = running_search(bench, tenant="flood")
    [short] = bench.submit("short", prompt(3, next(_starts)), 20, tenant="other")
    advance(bench)
    advance(bench)
    assert short.num_output
    assert bench.replica.num_slots_of == {"other": 1}
    assert len(beams) == WIDTH
    for beam in beams:
        assert beam.phase is Phase.SWAPPED
        assert beam.last_preemption is not None
        assert beam.last_preemption.method is PreemptionMethod.KEEP
    assert bench.scheduler.totals.preemptions == 1, "it yields as one"
    while bench.scheduler.is_live("short"):
        assert {beam.phase for beam in beams} == {Phase.SWAPPED}
        advance(bench)
    plan = bench.step()
    assert {beam.phase for beam in beams} == {Phase.RUNNING}
    assert [part.num_tokens for part in plan.scheduled] == [1] * WIDTH, "their KV was kept"
    assert run(bench) == undisturbed()


def test_search_takes_slots_from_several_sequences_in_one_step() -> None:
    bench = CoreBench(policy="fair", max_sequences=2 * WIDTH, num_blocks=4000)
    for number in range(2 * WIDTH):
        bench.submit(f"flood-{number}", prompt(5, next(_starts)), 1000, tenant="flood")
    for _ in range(MIN_STEPS + 2):
        advance(bench)
    submit_search(bench, tenant="other")
    advance(bench)
    assert bench.replica.num_slots_of == {"flood": WIDTH, "other": WIDTH}
    assert bench.scheduler.totals.preemptions == WIDTH


def test_search_takes_no_slot_if_it_may_not_take_as_many_as_it_needs() -> None:
    bench = CoreBench(policy="fair", max_sequences=WIDTH + 2, num_blocks=4000)
    for number in range(WIDTH + 2):
        bench.submit(f"flood-{number}", prompt(5, next(_starts)), 1000, tenant="flood")
    for _ in range(MIN_STEPS + 2):
        advance(bench)
    beams = submit_search(bench, tenant="other", weight=0.5)  # it may hold a third of the slots
    advance(bench)
    assert [beam.phase for beam in beams] == [Phase.QUEUED]
    assert bench.scheduler.totals.preemptions == 0


def test_siblings_yield_singly() -> None:
    bench = CoreBench(policy="fair", max_sequences=4, num_blocks=4000)
    siblings = bench.submit("siblings", PROMPT, 500, n=4, tenant="flood")
    for _ in range(MIN_STEPS + 4):
        advance(bench)
    bench.submit("short", prompt(3, next(_starts)), 20, tenant="other")
    advance(bench)
    assert sorted(one.phase.name for one in siblings) == ["RUNNING"] * 3 + ["SWAPPED"]


def test_search_keeps_its_slots_for_its_first_steps_although_its_beams_are_forked_in_each() -> None:
    bench = CoreBench(policy="fair", max_sequences=WIDTH, num_blocks=4000)
    beams = running_search(bench, 5, tenant="flood")
    [short] = bench.submit("short", prompt(3, next(_starts)), 20, tenant="other")
    num_steps = 5
    while short.phase is Phase.QUEUED:
        assert {beam.phase for beam in beams} == {Phase.RUNNING}
        advance(bench)
        num_steps += 1
    assert num_steps == MIN_STEPS + 1


def test_search_and_a_single_sequence_share_a_worker_by_the_token() -> None:
    """The slots are enough for one of them at a time. The tenant of the search is charged for all its beams."""
    bench = CoreBench(policy="fair", max_sequences=WIDTH, num_blocks=2000)
    beams = submit_search(bench, 1500, tenant="a")
    [single] = bench.submit("single", prompt(5, next(_starts)), 1500, tenant="b")
    for _ in range(700):
        advance(bench)
    served = WIDTH * beams[0].num_output
    assert abs(served - single.num_output) < 2 * WIDTH * MIN_STEPS + TURN_TOKENS


# Blocks.


def crowded(mode: PreemptionMode, num_host_blocks: int = 64) -> tuple[CoreBench, list[Sequence]]:
    """A search beside an earlier request that takes more and more blocks."""
    bench = CoreBench(num_blocks=70, num_host_blocks=num_host_blocks, preemption=mode)
    bench.submit("other", prompt(160, next(_starts)), 110)
    advance(bench)
    return bench, submit_search(bench)


def until_preempted(bench: CoreBench) -> list[Event]:
    events: list[Event] = []
    while not bench.scheduler.totals.preemptions:
        events += advance(bench)
    return events


def test_search_whose_blocks_are_swapped_comes_back_with_all_its_beams() -> None:
    bench, beams = crowded(PreemptionMode.SWAP)
    until_preempted(bench)
    assert bench.scheduler.totals.swaps == 1
    assert len(beams) > 1
    assert {beam.phase for beam in beams} <= {Phase.SWAPPED, Phase.PREEMPTED}
    assert bench.replica.num_slots == 1
    assert run(bench) == undisturbed()


def test_search_whose_blocks_are_freed_waits_as_one_sequence_and_forks_its_beams_again() -> None:
    bench, beams = crowded(PreemptionMode.RECOMPUTE)
    until_preempted(bench)
    [beam] = beams
    assert {one.phase for one in beams} <= {Phase.QUEUED, Phase.PREEMPTED}
    num_output = beam.num_output
    assert num_output > 5
    while beam.phase is not Phase.RUNNING:
        advance(bench)
    while len(beams) == 1:
        advance(bench)
    assert {one.num_output for one in beams} <= {num_output, num_output + 1}
    assert run(bench) == undisturbed()


def test_search_whose_kept_blocks_are_needed_gives_them_up_together() -> None:
    bench = CoreBench(policy="fair", max_sequences=WIDTH, num_blocks=70, num_host_blocks=0)
    beams = running_search(bench, tenant="flood")
    [long] = bench.submit("long", prompt(3, next(_starts)), 260, tenant="other", weight=1000.0)
    advance(bench)
    assert {beam.phase for beam in beams} == {Phase.SWAPPED}
    while len(beams) > 1:
        advance(bench)
    assert [beam.phase for beam in beams] == [Phase.QUEUED]
    assert long.num_output > 0
    assert run(bench) == undisturbed()


def test_search_on_a_lost_worker_goes_on_elsewhere() -> None:
    bench = CoreBench(max_sequences=WIDTH)
    beams = running_search(bench)
    num_output = beams[0].num_output
    bench.plan()
    bench.lose(bench.replica)
    assert [beam.phase for beam in beams] == [Phase.QUEUED]
    bench.replica = bench.join(max_sequences=WIDTH)
    assert run(bench) == undisturbed()
    assert num_output > 5


def test_retired_worker_hands_its_search_over() -> None:
    bench = CoreBench(max_sequences=WIDTH)
    beams = running_search(bench)
    bench.plan()
    other = bench.join(max_sequences=WIDTH)
    bench.scheduler.retire(bench.replica)
    bench.commit()
    assert [beam.phase for beam in beams] == [Phase.QUEUED]
    bench.replica = other
    assert run(bench) == undisturbed()


# The queue.


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_search_that_lost_its_blocks_waits_behind_requests_of_a_higher_priority(policy: str) -> None:
    """It was always first: the blocks that it had were short, and a request that came later waited for it."""
    bench = CoreBench(policy=policy, num_blocks=70, num_host_blocks=0, max_sequences=WIDTH + 1)
    bench.submit("other", prompt(160, next(_starts)), 110, priority=1)
    advance(bench)
    beams = submit_search(bench)
    until_preempted(bench)
    [urgent] = bench.submit("urgent", prompt(9, next(_starts)), 20, priority=1)
    for _ in range(3):
        advance(bench)
    assert urgent.phase is Phase.RUNNING
    assert [beam.phase for beam in beams] == [Phase.QUEUED]
    assert run(bench) == undisturbed()


def test_search_that_was_preempted_is_one_entry_of_the_queue() -> None:
    bench, beams = crowded(PreemptionMode.RECOMPUTE)
    until_preempted(bench)
    while beams[0].phase is Phase.PREEMPTED:
        bench.commit()
    assert bench.scheduler.num_queued == 1


# Poison requests.


def test_search_of_which_one_beam_crashes_workers_fails() -> None:
    """Tokens of its other beams do not clear it."""
    bench = CoreBench()
    beams = running_search(bench, 8)
    [bystander] = bench.submit("bystander", prompt(9, next(_starts)), 200)
    crashing = beams[0].tokens[:]
    failed = []
    num_losses = 0
    while bench.scheduler.is_live("search"):
        plan = bench.plan()
        assert plan is not None
        parts = [part.sequence.tokens[: part.start + part.num_tokens] for part in plan.scheduled]
        if any(tokens[: len(crashing)] == crashing for tokens in parts):
            failed += bench.lose(bench.replica)
            bench.replica = bench.join()
            num_losses += 1
            assert num_losses <= 3
        else:
            bench.commit()
    assert [event.reason for event in failed] == [Failure.QUARANTINED]
    assert num_losses == 3
    assert bystander.phase is not Phase.ENDED
