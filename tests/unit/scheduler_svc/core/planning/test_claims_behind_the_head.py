"""A request that is first in the queue and has no right to a slot holds up no other tenant that has one."""

from itertools import count

import pytest

from core_bench import SHAPE, CoreBench, prompt
from scheduler_svc.core.policy.preemption import MIN_STEPS
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Sequence

NUM_SLOTS = SHAPE.max_sequences
SMALL = 0.01  # weight of a tenant that may take a slot after 6,400 tokens of the flood
_starts = count(0, 10_000)


def flooded(num_tokens: int = 1000) -> CoreBench:
    """A tenant's long requests hold every slot; as many wait."""
    bench = CoreBench(policy="fair", num_blocks=4000)
    for number in range(2 * NUM_SLOTS):
        bench.submit(f"flood-{number}", prompt(5, next(_starts)), num_tokens, tenant="flood")
    for _ in range(3 * MIN_STEPS):
        advance(bench)
    return bench


def advance(bench: CoreBench) -> None:
    bench.now += 0.05
    bench.step()


def submitted(bench: CoreBench, tenant: str, weight: float = 1.0, number: int = 0) -> Sequence:
    [sequence] = bench.submit(f"{tenant}-{number}", prompt(3, next(_starts)), 3, tenant=tenant, weight=weight)
    return sequence


def steps_until_token(bench: CoreBench, sequence: Sequence, most: int = 500) -> int:
    """Steps from now on until a sequence has its first token."""
    for number in range(1, most + 1):
        advance(bench)
        if sequence.num_output:
            return number
    raise AssertionError(f"no token within {most} steps")


@pytest.mark.parametrize("num_small", [1, 15])
def test_tenant_behind_those_of_small_weights_gets_a_slot_at_once(num_small: int) -> None:
    bench = flooded()
    small = [submitted(bench, f"small-{number}", SMALL) for number in range(num_small)]
    advance(bench)
    assert bench.scheduler.slot_wait.seconds(submitted(bench, "probe").request) == 0.0
    other = submitted(bench, "other")
    assert steps_until_token(bench, other) <= 3
    assert not any(sequence.num_output for sequence in small)


def test_a_tenant_of_a_small_weight_has_the_first_slot_that_is_free() -> None:
    """Although another one takes slots all the time."""
    bench = flooded()
    small = submitted(bench, "small", SMALL)
    advance(bench)
    others: list[Sequence] = []
    while not small.num_output:
        others.append(submitted(bench, "other", number=len(others)))
        advance(bench)
    assert sum(other.phase is Phase.ENDED for other in others) <= 2


def test_slots_that_a_search_waits_for_are_not_taken_by_those_behind_it() -> None:
    bench = flooded(num_tokens=150)
    search = BeamParams(NUM_SLOTS, 1.0, EarlyStopping.NEVER)
    beams = bench.submit("search", prompt(3, next(_starts)), 3, tenant="small", weight=SMALL, beam=search)
    advance(bench)
    for number in range(600):
        submitted(bench, "other", number=number)
        advance(bench)
        if beams[0].num_output:
            return
    raise AssertionError("the search never runs")


def test_those_behind_take_turns_by_their_claims() -> None:
    """Of tenants with equal claims behind it, the one whose turn it is takes a slot."""
    bench = flooded()
    submitted(bench, "small", SMALL)
    others = [submitted(bench, f"other-{number}") for number in range(4)]
    waits = [0 if other.num_output else steps_until_token(bench, other) for other in others]
    assert sum(waits) <= 2 * len(others), waits
