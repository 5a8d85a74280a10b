"""What admission to a replica charges and counts."""

import pytest

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.request import Phase, Request


@pytest.mark.parametrize("num_cached", [0, 4])
def test_tenant_is_charged_for_the_prompt_tokens_that_are_not_cached(num_cached: int) -> None:
    bench = CoreBench(policy="fair", max_sequences=1)
    tokens = prompt(10 * BLOCK)
    if num_cached:
        bench.submit("before", tokens[: num_cached * BLOCK], 1, tenant="y")
        bench.run()
    bench.submit("a", tokens, 4, tenant="x")
    bench.submit("waits", prompt(4, 5000), 4, tenant="z")
    debt = bench.scheduler.waiting.policy.debt("x")
    bench.plan()
    assert bench.scheduler.waiting.policy.debt("x") - debt == (10 - num_cached) * BLOCK


def test_cache_counters_have_the_tokens_looked_up_and_found() -> None:
    bench = CoreBench()
    bench.submit("first", prompt(4 * BLOCK), 1)
    bench.run()
    bench.submit("second", prompt(6 * BLOCK), 1)
    bench.run()
    totals = bench.scheduler.totals
    assert (totals.cache_queries, totals.cache_hits, totals.host_hits) == (10 * BLOCK, 4 * BLOCK, 0)


def test_tokens_of_a_step_are_charged_by_the_weight_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoreBench(policy="fair")
    for number, weight in enumerate((1.0, 10.0, 1.0)):
        bench.submit(f"{number}", prompt(3, 100 * number), 4, tenant="x", weight=weight)
    bench.step()
    charged: list[tuple[float, int]] = []
    policy = bench.scheduler.waiting.policy
    monkeypatch.setattr(policy, "charge", lambda sequence, count: charged.append((sequence.request.weight, count)))
    bench.step()
    assert sorted(charged) == [(1.0, 2), (10.0, 1)]


@pytest.mark.parametrize(("priority", "phase"), [(0, Phase.WAITING_FOR_PREFIX), (1, Phase.RUNNING)])
def test_a_prefix_is_not_waited_for_where_a_lower_class_computes_it(priority: int, phase: Phase) -> None:
    bench = CoreBench(policy="fair")
    tokens = prompt(30 * BLOCK)
    bench.submit("batch", tokens, 4, tenant="x")
    bench.step()
    [chat] = bench.submit("chat", [*tokens, 1], 4, tenant="x", priority=priority)
    bench.plan()
    assert chat.phase is phase
    bench.commit()
    bench.run()


def test_of_several_in_a_higher_class_one_computes_the_prefix_and_the_others_wait_for_it() -> None:
    bench = CoreBench(policy="fair", max_step_tokens=100)
    tokens = prompt(48 * BLOCK)
    bench.submit("batch", tokens, 4, tenant="x")
    bench.step()
    chats = [bench.submit(f"chat {n}", [*tokens, n], 4, tenant="x", priority=1)[0] for n in range(3)]
    bench.step()
    bench.plan()  # has tokens left for the others
    assert [chat.phase for chat in chats] == [Phase.RUNNING, Phase.WAITING_FOR_PREFIX, Phase.WAITING_FOR_PREFIX]
    assert {bench.scheduler.waiting.prefix_waiters.producer_of(chat) for chat in chats[1:]} == {chats[0]}
    bench.commit()
    bench.run()


def test_a_request_waits_no_more_when_its_last_queued_sequence_has_ended() -> None:
    bench = CoreBench(policy="fair")
    limits = AccountLimits("account", max_queued=1)
    first, second = bench.submit("both", prompt(8), 60, n=2, limits=limits)
    bench.step()
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.QUEUED)
    another = Request("another", [1, 2], 1, 4, limits=limits)
    assert bench.scheduler.check(another, bench.now) is not None
    bench.scheduler.finish("both", second.index, 0)
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.ENDED)
    assert bench.scheduler.check(another, bench.now) is None
