"""Token budgets: nothing is planned that is not leased, prompts are paid once, and who cannot pay delays nobody."""

from dataclasses import replace

import pytest

from core_bench import BLOCK, EMBEDDING, CoreBench, keys, prompt
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.budgets import QUANTUM, Budget, Budgets, Demand
from scheduler_svc.core.events import Failure, TokensEvent
from scheduler_svc.core.explain import SequenceStatus, explain
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request, RestoredSequence

PER_MINUTE = 6000
LIMITS = AccountLimits("x/", tokens_per_minute=PER_MINUTE)
PLAIN = 10  # tokens of a prompt


def budget_of(bench: CoreBench, account: str = "x/") -> Budget:
    return next(budget for budget in bench.scheduler.budgets if budget.account == account)


def lease(bench: CoreBench, num_tokens: int) -> None:
    budget_of(bench).grant(num_tokens)


def delivered(bench: CoreBench, count: int) -> int:
    """The tokens of so many steps, if there are as many."""
    num_tokens = 0
    for _ in range(count):
        if bench.plan() is None:
            break
        num_tokens += sum(len(event.token_ids) for event in bench.commit() if isinstance(event, TokensEvent))
        bench.scheduler.budgets.check_integrity()
    return num_tokens


def test_nothing_runs_before_tokens_are_leased_and_as_many_are_delivered_as_were_paid() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(PLAIN), 100, limits=LIMITS)
    assert bench.plan() is None
    assert budget_of(bench).demand == Demand(64, PLAIN + QUANTUM)
    lease(bench, PLAIN + QUANTUM)
    assert delivered(bench, 100) == QUANTUM
    assert budget_of(bench).available == 0
    lease(bench, 100)
    assert delivered(bench, 100) == 100 - QUANTUM
    assert budget_of(bench).spent == PLAIN + 100
    assert not list(bench.scheduler.keys)


def test_a_step_computes_as_many_sequences_as_can_be_paid() -> None:
    bench = CoreBench()
    for number in range(4):
        bench.submit(f"{number}", prompt(PLAIN, 1000 * number), 50, limits=LIMITS)
    bench.plan()
    lease(bench, 4 * PLAIN + 4 * QUANTUM + 1 + 2 + 3)
    assert delivered(bench, 1000) == 4 * QUANTUM + 1 + 2 + 3 - budget_of(bench).available
    assert budget_of(bench).available < QUANTUM


def test_promised_tokens_are_not_promised_again_while_two_steps_are_in_flight() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(PLAIN), 2, limits=LIMITS)
    bench.plan()
    lease(bench, PLAIN + 2)
    assert bench.plan() is not None
    assert bench.plan() is not None
    assert (budget_of(bench).promised, budget_of(bench).available) == (2, 0)
    bench.commit()
    assert (budget_of(bench).promised, budget_of(bench).spent) == (1, PLAIN + 1)
    bench.commit()
    assert (budget_of(bench).promised, budget_of(bench).spent) == (0, PLAIN + 2)


def test_a_paused_sequence_gives_up_its_slot_and_keeps_its_blocks() -> None:
    bench = CoreBench(max_sequences=1)
    paused = bench.submit("a", prompt(PLAIN), 100, limits=LIMITS)[0]
    bench.plan()
    lease(bench, PLAIN + QUANTUM)
    assert delivered(bench, 100) == QUANTUM
    assert paused.phase is Phase.SWAPPED
    assert paused.swapped_kv is not None
    assert paused.swapped_kv.is_kept
    assert (bench.scheduler.totals.pauses, bench.scheduler.totals.preemptions) == (1, 0)
    bench.submit("b", prompt(PLAIN, 1000), 5)
    assert delivered(bench, 100) == 5
    num_computed = bench.num_computed
    lease(bench, 1000)
    bench.run()
    assert bench.num_computed - num_computed == 100 - QUANTUM  # its blocks were kept: no token is computed again


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_who_cannot_pay_is_passed_over(policy: str) -> None:
    bench = CoreBench(policy=policy, max_sequences=2)
    for number in range(3):
        bench.submit(f"x{number}", prompt(PLAIN, 1000 * number), 20, limits=LIMITS, priority=1)
    bench.submit("y", prompt(PLAIN, 9000), 20)
    assert keys(bench.step()) == ["y"]
    state = explain(bench.scheduler, "x0", bench.now)
    assert state is not None
    assert state.sequences[0].status is SequenceStatus.WAITING_FOR_TOKENS
    assert bench.scheduler.num_queued == 3


def test_a_large_prompt_is_not_overtaken_by_small_ones_of_its_account() -> None:
    bench = CoreBench()
    bench.submit("large", prompt(500), 10, limits=LIMITS)
    bench.plan()
    for number in range(3):
        bench.submit(f"{number}", prompt(PLAIN, 2000 + 1000 * number), 10, limits=LIMITS)
        lease(bench, 100)
        assert bench.plan() is None
    assert budget_of(bench).demand == Demand(210, 210)  # 500 and 10 less 300
    lease(bench, 210)
    assert keys(bench.step()) == ["large"]


def test_the_others_of_an_account_follow_in_the_same_step() -> None:
    bench = CoreBench()
    for number in range(4):
        bench.submit(f"{number}", prompt(PLAIN, 1000 * number), 4, limits=LIMITS)
    assert bench.plan() is None
    lease(bench, 1000)
    assert keys(bench.step()) == ["0", "1", "2", "3"]


def test_sequences_of_an_account_do_not_come_and_go_with_each_token() -> None:
    """With tokens for one only, the oldest runs, and the others wait until it has ended."""
    bench = CoreBench()
    for number in range(8):
        bench.submit(f"{number}", prompt(PLAIN, 1000 * number), 3 * QUANTUM, limits=LIMITS)
    order: list[str] = []
    for _ in range(100):
        plan = bench.plan()
        if plan is None:
            lease(bench, budget_of(bench).demand.least)  # type: ignore[union-attr]
            continue
        order += [key for key in keys(plan) if key not in order]
        bench.commit()
    assert bench.scheduler.totals.pauses <= 100 // QUANTUM + 1
    assert order == sorted(order)


def test_a_prompt_is_paid_once_whatever_happens_to_its_worker() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(PLAIN), 10, limits=LIMITS)
    bench.plan()
    lease(bench, 100)
    bench.steps(3)
    bench.plan()
    bench.plan()
    assert budget_of(bench).promised == 2
    bench.lose(bench.replica)
    assert (budget_of(bench).promised, budget_of(bench).spent) == (0, PLAIN + 3)
    bench.replica = bench.join()
    bench.run()
    assert budget_of(bench).spent == PLAIN + 10


@pytest.mark.parametrize(("factor", "cost"), [(0.0, 0), (0.1, 4), (0.5, 20), (1.0, 40)])
def test_cached_tokens_of_a_prompt_cost_a_factor(factor: float, cost: int) -> None:
    bench = CoreBench()
    tokens = prompt(11 * BLOCK)
    bench.submit("before", tokens[: 10 * BLOCK], 1)
    bench.run()
    bench.submit("a", tokens, 1, limits=AccountLimits("x/", tokens_per_minute=PER_MINUTE, cached_token_factor=factor))
    bench.plan()
    lease(bench, 100)
    bench.run()
    assert budget_of(bench).spent == cost + BLOCK + 1


def test_a_prompt_that_proves_not_to_be_cached_waits_for_the_rest_of_its_cost() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(40), 1, limits=AccountLimits("x/", tokens_per_minute=PER_MINUTE, cached_token_factor=0.0))
    assert bench.plan() is None
    assert budget_of(bench).demand == Demand(64, 1)
    lease(bench, 10)
    assert bench.plan() is None
    assert budget_of(bench).demand == Demand(54, 31)
    lease(bench, 31)
    bench.run()
    assert budget_of(bench).spent == 41


def test_siblings_share_the_price_of_their_prompt() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(PLAIN), 5, n=3, limits=LIMITS)
    bench.plan()
    lease(bench, 1000)
    bench.run()
    assert budget_of(bench).spent == PLAIN + 3 * 5


def test_a_value_costs_its_prompt() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(PLAIN), 1, result=EMBEDDING, limits=LIMITS)
    assert bench.plan() is None
    assert budget_of(bench).demand == Demand(64, PLAIN)
    lease(bench, PLAIN)
    bench.run()
    assert (budget_of(bench).spent, budget_of(bench).available) == (PLAIN, 0)


def test_a_beam_search_waits_for_all_that_it_may_cost_and_returns_the_rest() -> None:
    bench = CoreBench()
    beam = BeamParams(2, 1.0, EarlyStopping.NEVER)
    bench.submit("a", prompt(PLAIN), 20, n=2, beam=beam, limits=LIMITS)
    lease(bench, PLAIN + 39)
    assert bench.plan() is None
    lease(bench, 1)
    assert bench.plan() is not None
    assert (budget_of(bench).promised, budget_of(bench).available) == (40, 0)
    bench.scheduler.cancel("a")
    bench.commit()
    assert (budget_of(bench).promised, budget_of(bench).spent, budget_of(bench).available) == (0, PLAIN, 40)


def test_the_owner_is_called_where_tokens_come_back_for_what_lacked_them() -> None:
    calls: list[int] = []
    budgets = Budgets("7", lambda: calls.append(budget.available))
    charges = [budgets.charge(LIMITS, PLAIN, num_tokens, 0.0) for num_tokens in (40, 20)]
    search, other = (charge for charge in charges if charge is not None)
    budget = search.budget
    budget.grant(PLAIN + 40)
    assert search.pay_prompt(0, 10)
    calls.clear()
    search.pay_search(2)
    search.close()
    assert not calls  # nothing lacks them
    assert (search.budget.available, other.num_needed(10)) == (38, PLAIN + 20)
    budget.promised += 30
    budget.note_shortfall(PLAIN + 20)
    budget.release_promised(20, 0)
    assert not calls  # still too few
    budget.release_promised(10, 5)
    assert calls == [33]
    budget.release_promised(0, 0)
    assert calls == [33]


SLOW = AccountLimits("x/", tokens_per_minute=60)  # what a request needs to start is there after 26 s


def test_a_deadline_before_the_account_has_tokens_is_rejected_at_once() -> None:
    bench = CoreBench()
    bench.submit("first", prompt(PLAIN), 100, limits=SLOW)
    late = Request("late", prompt(PLAIN), 1, 100, limits=SLOW, deadline=5.0)
    assert bench.scheduler.check(late, 0.0) is None  # nothing is known of the bucket
    budget_of(bench).note_bucket(0.0, 0.0)
    refused = bench.scheduler.check(late, 0.0)
    assert refused is not None
    assert refused.reason is Failure.DEADLINE_INFEASIBLE
    assert refused.retry_after == pytest.approx(21.0, abs=0.2)  # and as long as it runs
    assert "tokens_per_minute of the key, 60" in refused.message
    assert bench.scheduler.check(replace(late, deadline=26.5), 0.0) is None
    assert bench.scheduler.check(replace(late, deadline=27.0), 22.0) is None  # the bucket fills meanwhile
    raised = replace(SLOW, tokens_per_minute=60_000)
    assert bench.scheduler.check(replace(late, limits=raised), 0.0) is None  # at another rate than is known
    lease(bench, 1)
    assert bench.scheduler.check(late, 0.0) is None


def test_tokens_that_are_returned_change_what_is_known_of_the_bucket() -> None:
    bench = CoreBench()
    bench.submit("first", prompt(PLAIN), 100, limits=SLOW)
    budget = budget_of(bench)
    lease(bench, 50)
    budget.note_bucket(0.0, 0.0)
    assert budget.take_back() == 50
    assert budget.seconds_until(50, 0.0) == 0.0


def test_requests_end_as_soon_as_their_account_is_known_to_pay_too_late() -> None:
    bench = CoreBench()
    for key, deadline in (("none", None), ("late", 5.0), ("in time", 30.0)):
        bench.submit(key, prompt(PLAIN), 100, limits=SLOW, deadline=deadline)
    budget = budget_of(bench)
    assert bench.scheduler.expire_unpaid(budget, 0.0) == []
    budget.note_bucket(0.0, 0.0)
    events = bench.scheduler.expire_unpaid(budget, 0.0)
    assert [(event.request.key, event.reason, event.retry_after) for event in events] == [
        ("late", Failure.DEADLINE_INFEASIBLE, 21.0)
    ]
    assert set(bench.scheduler.keys) == {"none", "in time"}


@pytest.mark.parametrize(("num_prompt", "is_refused"), [(PER_MINUTE - 1, False), (PER_MINUTE, True)])
def test_what_can_never_be_paid_is_refused(num_prompt: int, is_refused: bool) -> None:
    bench = CoreBench(num_blocks=2000)
    request = Request("a", prompt(num_prompt), 1, 1, limits=LIMITS)
    refused = bench.scheduler.check(request, 0.0)
    assert (refused is not None) is is_refused
    if refused is not None:
        assert refused.reason is Failure.PROMPT_TOO_COSTLY
        assert "tokens_per_minute of the key, 6000" in refused.message
    restored = [RestoredSequence([], False)]
    assert bench.scheduler.submit(request, 0.0, restored) is None  # it was accepted under an earlier limit
    bench.plan()
    lease(bench, num_prompt + 1)
    assert bench.plan() is not None


@pytest.mark.parametrize(
    ("num_prompt", "reason"), [(PER_MINUTE - 1, Failure.SEARCH_TOO_WIDE), (PER_MINUTE, Failure.PROMPT_TOO_COSTLY)]
)
def test_the_refusal_of_a_search_names_what_is_too_costly(num_prompt: int, reason: Failure) -> None:
    beam = BeamParams(2, 1.0, EarlyStopping.NEVER)
    request = Request("a", prompt(num_prompt), 1, 1, beam=beam, limits=LIMITS)
    refused = CoreBench(num_blocks=4000).scheduler.check(request, 0.0)
    assert refused is not None
    assert refused.reason is reason


@pytest.mark.parametrize(
    ("restored", "cost"),
    [
        (RestoredSequence([], False), PLAIN + 5),
        (RestoredSequence([], False, is_prompt_paid=True), 5),
        (RestoredSequence([7, 7], False), 3),
    ],
)
def test_what_an_earlier_leader_charged_is_not_charged_again(restored: RestoredSequence, cost: int) -> None:
    bench = CoreBench()
    request = Request("a", prompt(PLAIN), 1, 5, limits=LIMITS)
    assert bench.scheduler.submit(request, 0.0, [restored]) is None
    bench.plan()
    lease(bench, 100)
    bench.run()
    assert budget_of(bench).spent == cost


def test_a_cancelled_request_pays_nothing_for_what_was_not_delivered() -> None:
    bench = CoreBench()
    bench.submit("queued", prompt(PLAIN), 5, limits=LIMITS)
    bench.scheduler.cancel("queued")
    assert (budget_of(bench).spent, budget_of(bench).num_live) == (0, 0)
    bench.submit("a", prompt(PLAIN), 5, limits=LIMITS)
    bench.plan()
    lease(bench, 100)
    bench.step()
    bench.plan()
    bench.scheduler.cancel("a")
    bench.commit()
    assert (budget_of(bench).spent, budget_of(bench).promised, budget_of(bench).num_live) == (PLAIN + 1, 0, 0)


def test_the_limit_of_the_latest_request_applies() -> None:
    bench = CoreBench()
    for number, (arrived_at, per_minute) in enumerate([(5.0, 600), (9.0, 1200), (7.0, 300)]):
        bench.now = arrived_at
        limits = AccountLimits("x/", tokens_per_minute=per_minute)
        bench.submit(f"{number}", prompt(PLAIN, 1000 * number), 4, limits=limits)
    assert budget_of(bench).tokens_per_minute == 1200


def test_speculated_tokens_are_limited_to_those_leased() -> None:
    bench = CoreBench(max_sampled_tokens=4, block_size=64)
    bench.submit("a", prompt(PLAIN), 30, limits=LIMITS)
    bench.plan()
    lease(bench, PLAIN + QUANTUM)
    bench.steps(QUANTUM - 2)
    plan = bench.plan()
    assert plan is not None
    assert plan.scheduled[0].max_extra_tokens == 1
    assert budget_of(bench).available == 0


def test_a_value_leaves_no_negative_number_of_tokens_to_a_worker_that_speculates() -> None:
    bench = CoreBench(max_sampled_tokens=4, max_step_tokens=9)
    bench.submit("a", prompt(PLAIN), 1, result=EMBEDDING, limits=LIMITS)
    bench.plan()
    lease(bench, PLAIN)
    parts = [part for plan in bench.steps(2) for part in plan.scheduled]
    assert [(part.num_tokens, part.max_extra_tokens) for part in parts] == [(9, 0), (1, 0)]


def test_a_pause_does_not_raise_the_priority() -> None:
    bench = CoreBench(policy="fair", max_sequences=1)
    bench.submit("x", prompt(PLAIN), 100, limits=LIMITS)
    bench.plan()
    lease(bench, PLAIN + QUANTUM)
    delivered(bench, 100)
    bench.submit("w", prompt(PLAIN, 500), 100, limits=LIMITS)
    assert bench.plan() is None
    bench.now = 1000.0
    sequences = [bench.scheduler.sequences(key)[0] for key in ("x", "w")]
    assert [sequence.seconds_waited(bench.now) for sequence in sequences] == [0.0, 0.0]


def test_the_leases_of_an_account_are_small() -> None:
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits()))
    for number in range(30):
        bench.submit(f"{number}", prompt(PLAIN, 100 * number), 100, limits=LIMITS)
    bench.plan()
    budget = budget_of(bench)
    assert budget.demand == Demand(PER_MINUTE // 10, PLAIN + QUANTUM)
    budget.grant(PER_MINUTE // 10)
    while budget.demand is None:
        bench.step()
    assert budget.demand is not None
    assert budget.demand.least == 1  # what runs goes on with whatever there is
    assert budget.demand.most + budget.available <= PER_MINUTE // 10
