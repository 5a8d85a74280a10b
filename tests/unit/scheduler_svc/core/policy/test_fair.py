"""What `fair` guarantees: shares by the token, bounds on waiting, the order of victims."""

import random
from collections import Counter
from typing import Any

import pytest

from scheduler_svc.core.policy import FairPolicy, PolicySettings
from scheduler_svc.core.policy.fair import MAX_CLASSES
from scheduler_svc.core.policy.fair_class import CREDIT_TOKENS
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR, Request, Sequence

AGEING, HORIZON = 10.0, 60.0


class Bench:
    """A policy with one slot: the first sequence is served at once."""

    def __init__(self) -> None:
        self.policy = FairPolicy(PolicySettings(AGEING, HORIZON))
        self.now = 0.0
        self.num_sequences = 0

    def come(self, tenant: str = "a", num_prompt: int = 10, prompt_seconds: float = 0.0, **fields: Any) -> Sequence:
        number = self.num_sequences
        self.num_sequences += 1
        fields.setdefault("arrived_at", self.now)
        request = Request(str(number), [1] * num_prompt, 1, 1, tenant=tenant, **fields)
        sequence = Sequence(number, request, 0, number, list(request.prompt), prompt_seconds=prompt_seconds)
        self.policy.add(sequence, self.now)
        return sequence

    def take(self) -> Sequence:
        first = self.policy.first(self.now)
        assert first is not None
        self.policy.remove(first)
        self.policy.charge(first, len(first.request.prompt))
        return first

    def until(self, sequence: Sequence) -> int:
        """The number of sequences served before it, each in no time."""
        return next(count for count in range(10**6) if self.take() is sequence)


def served(loads: dict[str, float], seed: int, weights: dict[str, float] | None = None) -> Counter[str]:
    """Tokens by tenant if one sequence is served per tick. Tenants send requests of 5 to 50 tokens at these loads."""
    bench, tokens = Bench(), Counter[str]()
    rngs = {tenant: random.Random(f"{seed} {tenant}") for tenant in loads}
    busy_until = 0
    for tick in range(40_000):
        bench.now = tick / 100
        for tenant, load in loads.items():
            if rngs[tenant].random() < load / 27.5:
                bench.come(tenant, rngs[tenant].randint(5, 50), weight=(weights or {}).get(tenant, 1.0))
        if tick >= busy_until and len(bench.policy):
            sequence = bench.take()
            tokens[sequence.request.tenant] += len(sequence.request.prompt)
            busy_until = tick + len(sequence.request.prompt)
    return tokens


@pytest.mark.parametrize("load", [0.08, 0.15])
def test_tenant_with_ten_times_the_load_takes_nothing_from_others(load: float) -> None:
    tenants = [f"tenant {number}" for number in range(10)]
    alike = served(dict.fromkeys(tenants, load), seed=1)
    greedy = served({**dict.fromkeys(tenants, load), tenants[0]: 10 * load}, seed=1)
    assert greedy[tenants[0]] > 0
    if load > 0.1:
        assert all(greedy[tenant] >= 0.95 * alike[tenant] for tenant in tenants[1:])
    else:  # they get all that they request, except for requests of the last moments
        assert sum(greedy[tenant] for tenant in tenants[1:]) >= 0.95 * sum(alike[tenant] for tenant in tenants[1:])


def test_tokens_are_shared_by_weight() -> None:
    tokens = served({"a": 2.0, "b": 2.0}, seed=2, weights={"a": 3.0, "b": 1.0})
    assert tokens["a"] / tokens["b"] == pytest.approx(3.0, rel=0.01)


def test_new_request_waits_for_one_turn_of_each_tenant_however_long_their_queues() -> None:
    bench = Bench()
    for number in range(300):
        bench.come(f"tenant {number % 3}", num_prompt=100)
    for _ in range(50):
        bench.take()
    assert bench.until(bench.come("new")) <= 3


def test_idle_tenant_saves_up_no_more_than_the_credit() -> None:
    bench = Bench()
    bench.come("idle")
    bench.take()
    bench.come("busy", num_prompt=10 * CREDIT_TOKENS)
    bench.take()
    for _ in range(CREDIT_TOKENS // 10 + 40):
        bench.come("busy")
        bench.come("idle")
    turns = Counter(bench.take().request.tenant for _ in range(CREDIT_TOKENS // 10 + 40))
    assert 19 <= turns["busy"] <= 21


def test_tenant_that_is_served_less_does_not_wait_for_one_that_always_waits() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.come("flood", num_prompt=20)
    bench.take()
    assert bench.until(bench.come("chats", num_prompt=200)) <= 1
    for _ in range(20):
        bench.take()
    for _ in range(20):  # sent while the last one still runs: nothing of the tenant waits in between
        assert bench.until(bench.come("chats", num_prompt=50)) == 0
        for _ in range(2):
            assert bench.take().request.tenant == "flood"


def test_tenants_that_come_back_together_delay_another_by_the_credit_of_each() -> None:
    bench, tenants = Bench(), [f"tenant {number}" for number in range(20)]
    for tenant in tenants:
        bench.come(tenant)
        bench.take()
    bench.come("busy", num_prompt=100 * CREDIT_TOKENS)
    bench.take()
    waits = bench.come("busy")
    for tenant in tenants:
        for _ in range(CREDIT_TOKENS):
            bench.come(tenant)
    assert bench.until(waits) <= len(tenants) * (CREDIT_TOKENS // 10 + 2)


def test_tenant_that_enters_an_empty_class_starts_at_the_last_counter() -> None:
    bench = Bench()
    last = bench.come("a")
    bench.policy.charge(last, 500)
    bench.policy.remove(last)
    bench.come("b")
    for _ in range(20):
        bench.come("a")
        bench.come("b")
    turns = Counter(bench.take().request.tenant for _ in range(20))
    assert turns["a"] >= 9


def test_each_higher_class_delays_a_request_by_one_ageing_time() -> None:
    bench = Bench()
    low = bench.come("low")
    for number in range(100):
        bench.come("middle", priority=1, arrived_at=0.0)
        bench.come("high", priority=2**31 - 1, arrived_at=0.0)
        bench.now = number / 100
    bench.now = 2 * AGEING - 0.01
    assert all(bench.take() is not low for _ in range(20))
    bench.now = 2 * AGEING
    assert bench.until(low) <= 2, "one turn of each other tenant"


def test_many_priorities_delay_a_request_by_no_more_than_the_bound() -> None:
    bench = Bench()
    low = bench.come("low", priority=-(2**31))
    for number in range(1000):
        bench.come("high", priority=number * 1000)
    bench.now = (MAX_CLASSES - 1) * AGEING
    assert bench.until(low) <= 1


def test_unused_priorities_are_forgotten() -> None:
    bench = Bench()
    for priority in range(2, 10):
        bench.come("other", priority=priority)
        bench.take()
    bench.now = 20 * AGEING
    bench.come("high", priority=1)
    low = bench.come("low")
    for _ in range(10):
        bench.come("high", priority=1)
    bench.now += AGEING
    assert bench.until(low) <= 1


def test_no_request_of_a_tenant_precedes_one_that_arrived_a_horizon_earlier() -> None:
    bench = Bench()
    patient = bench.come("a")
    bench.now = HORIZON + 0.01
    for _ in range(10):
        bench.come("a", deadline=bench.now + 0.001)
    assert bench.take() is patient


def test_earliest_deadline_is_first_within_a_tenant() -> None:
    bench = Bench()
    whenever, later, soon = bench.come("a"), bench.come("a", deadline=20.0), bench.come("a", deadline=10.0)
    assert [bench.take() for _ in range(3)] == [soon, later, whenever]


def test_a_short_prompt_goes_before_a_long_one_of_its_tenant_that_came_shortly_before() -> None:
    bench = Bench()
    long = bench.come("a", prompt_seconds=2.0)
    bench.now = FIRST_TOKEN_FACTOR * 1.5 - 0.01
    soon = bench.come("a", prompt_seconds=0.5)
    bench.now += 0.02
    late = bench.come("a", prompt_seconds=0.5)
    assert [bench.take() for _ in range(3)] == [soon, long, late]


def test_a_deadline_is_due_however_long_the_prompt_takes() -> None:
    bench = Bench()
    bench.come("a", prompt_seconds=0.1)
    due = bench.come("a", prompt_seconds=50.0, deadline=20.0)
    assert bench.take() is due


def test_a_long_prompt_that_rose_to_a_class_does_not_hold_back_what_rose_after_it() -> None:
    bench = Bench()
    long = bench.come("a", prompt_seconds=40.0)
    bench.now = 1.0
    short = bench.come("a", prompt_seconds=0.1)
    waits: dict[Sequence, float] = {}
    while bench.now < 60 and len(waits) < 2:
        bench.now += 1.0
        bench.come("a", priority=1)
        taken = bench.take()
        if taken in (long, short):
            waits[taken] = bench.now
    assert waits == {long: AGEING, short: AGEING + 1.0}


def test_between_classes_the_lengths_of_prompts_do_not_matter() -> None:
    bench = Bench()
    high = bench.come("a", priority=1, prompt_seconds=10.0)
    bench.now = 1.0
    low = bench.come("a", prompt_seconds=1.0)
    bench.now += AGEING
    assert bench.policy.outranks(high, low, bench.now)
    assert [bench.take() for _ in range(2)] == [high, low]


def test_a_sequence_with_output_is_due_as_one_without_a_prompt() -> None:
    bench = Bench()
    begun = bench.come("a", prompt_seconds=50.0)
    bench.take()
    begun.tokens.append(7)
    bench.now = 1.0
    bench.come("a")
    bench.policy.add(begun, bench.now)
    assert bench.take() is begun


def test_prompts_of_other_tenants_take_turns_however_long_they_are() -> None:
    bench = Bench()
    for _ in range(10):
        bench.come("short", prompt_seconds=0.1)
    assert bench.until(bench.come("long", prompt_seconds=50.0)) <= 1


def test_deadlines_of_one_tenant_do_not_delay_another() -> None:
    bench = Bench()
    for _ in range(10):
        bench.come("hasty", deadline=1.0)
    assert bench.until(bench.come("calm")) <= 1


def test_requeued_sequence_has_the_place_of_its_arrival() -> None:
    bench = Bench()
    first = bench.come("a")
    bench.now = 5.0
    bench.come("a")
    bench.take()
    bench.policy.add(first, 6.0)
    assert bench.take() is first


def test_victims_are_ordered_by_class_then_debt_then_arrival() -> None:
    bench = Bench()
    urgent = bench.come("b", priority=1, num_prompt=1000)
    debtor = bench.come("a", num_prompt=500)
    early, late = bench.come("b", num_prompt=1), bench.come("c", num_prompt=1)
    for _ in range(4):
        bench.take()
    bench.policy.charge(debtor, 5000)
    bench.come("d")
    order = sorted([late, urgent, debtor, early], key=bench.policy.preemption_key, reverse=True)
    assert order[0] is debtor
    assert order[-1] is urgent


def test_running_request_counts_in_the_class_that_it_rose_to() -> None:
    bench = Bench()
    low = bench.come("low")
    bench.take()
    bench.come("high", priority=5)
    assert bench.policy.effective_priority(low, 1.0) == 0
    assert bench.policy.effective_priority(low, AGEING) == 5
    assert bench.policy.preemption_key(low)[0] == -5


@pytest.mark.parametrize("other", [-3, 0, 9])
def test_running_request_keeps_its_priority_when_its_class_is_forgotten(other: int) -> None:
    bench = Bench()
    running = bench.come(priority=5)
    bench.take().stop_waiting(bench.now)
    for _ in range(20):
        bench.now += AGEING
        latest = bench.come(priority=other)
    assert bench.policy.effective_priority(running, bench.now) == 5
    assert bench.policy.preemption_key(running)[0] == -5
    assert bench.policy.outranks(latest, running, bench.now) is (other > 5)


@pytest.mark.parametrize(("num_served", "expected"), [(0, True), (50, False)], ids=["served less", "served more"])
def test_higher_priority_outranks_what_rose_to_its_class_only_if_its_tenant_has_the_earlier_turn(
    num_served: int, expected: bool
) -> None:
    bench = Bench()
    bench.come("c", priority=1)  # keeps the class in use
    risen = bench.come("a", priority=0)
    bench.now = 2 * AGEING
    high = bench.come("b", priority=1)
    assert bench.policy.first(bench.now) is not None  # now it has risen
    bench.policy.charge(high, num_served)
    bench.policy.charge(risen, 20)
    assert bench.policy.outranks(high, risen, bench.now) is expected
    assert (bench.policy.position(high, bench.now) < bench.policy.position(risen, bench.now)) is expected


def test_debt_is_the_counter_less_the_smallest_one_that_waits() -> None:
    bench = Bench()
    for tenant in ("a", "b"):
        for _ in range(2):
            bench.come(tenant)
    bench.policy.charge(bench.come("a", weight=2.0), 300)
    assert bench.policy.debt("a") == 150.0
    assert bench.policy.debt("b") == 0.0
    assert bench.policy.debt("unknown") == 0.0


def test_position_is_the_number_admitted_before() -> None:
    bench, rng = Bench(), random.Random(3)
    sequences = [
        bench.come(rng.choice("abcdef"), rng.randint(1, 40), priority=rng.choice([0, 0, 3])) for _ in range(200)
    ]
    positions = {sequence: bench.policy.position(sequence, bench.now) for sequence in sequences}
    order = [bench.take() for _ in sequences]
    high = sum(sequence.request.priority == 3 for sequence in sequences)
    assert [positions[sequence] for sequence in order[:high]] == list(range(high))
    assert all(positions[sequence] >= high for sequence in order[high:])
    with pytest.raises(KeyError):
        bench.policy.position(sequences[0], bench.now)


def test_idle_tenants_are_forgotten_unless_they_have_debt() -> None:
    bench = Bench()
    bench.come("steady")
    bench.policy.charge(bench.come("debtor"), 10**6)
    for number in range(2000):
        bench.come(f"tenant {number}")
        bench.come("steady")
        bench.take()
        bench.take()
    assert len(bench.policy._tenants) < 1000
    assert bench.policy.debt("debtor") > 0


def test_tenants_that_come_once_are_forgotten() -> None:
    bench = Bench()
    for number in range(5000):
        bench.now += 1
        bench.come(f"tenant {number}")
        bench.policy.charge(bench.take(), 100)
    assert len(bench.policy._tenants) < 1000
    assert bench.policy.debt("tenant 4999") > 0


def test_tenant_whose_requests_run_is_not_forgotten() -> None:
    bench = Bench()
    bench.come("runs")
    running = bench.take()
    for number in range(1000):
        bench.now += 1
        bench.come(f"tenant {number}")
        bench.take()
        bench.policy.charge(running, 100)
    assert bench.policy.debt("runs") >= 1000 * 100


def test_100_000_queued_requests_are_admitted_in_fair_turns() -> None:
    bench, rng = Bench(), random.Random(4)
    tenants = [f"tenant {number}" for number in range(1000)]
    for _ in range(100_000):
        bench.come(rng.choice(tenants[: rng.choice([10, 1000])]))
    turns = Counter[str]()
    for _ in range(5_000):
        turns[bench.take().request.tenant] += 1
    assert max(turns.values()) - min(turns.values()) <= 1, "all prompts are equally long, and all have more to run"
