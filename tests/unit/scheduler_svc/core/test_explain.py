"""Explanations of live requests."""

import pytest

from core_bench import BLOCK, CoreBench, prompt
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.explain import Explanation, SequenceStatus, explain, summaries
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import STOP_STRING_LEAD, PreemptionMethod, Request


def explanation_of(bench: CoreBench, key: str) -> Explanation:
    answer = explain(bench.scheduler, key, bench.now)
    assert answer is not None
    return answer


def under_pressure(mode: PreemptionMode) -> tuple[CoreBench, str]:
    """And the key of the victim."""
    bench = CoreBench(num_blocks=30, preemption=mode)
    for place in range(4):
        bench.submit(f"{place}", prompt(8, 1000 * place), 60)
    while not (preempted := bench.step().preempted):
        pass
    return bench, preempted[0].request.key


def test_request_that_is_not_live_has_no_explanation() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(4), 1)
    bench.run()
    assert explain(bench.scheduler, "a", bench.now) is None


def test_running_sequence_reports_its_blocks() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(10), 20, tenant="t", deadline=60.0)
    bench.steps(2)
    bench.now = 5.0
    answer = explanation_of(bench, "a")
    [one] = answer.sequences
    assert (answer.tenant, answer.age, answer.time_left, answer.num_prompt) == ("t", 5.0, 55.0, 10)
    assert (one.status, one.num_known, one.num_computed, one.num_generated) == (SequenceStatus.RUNNING, 12, 11, 2)
    assert (one.num_device_blocks, one.num_host_blocks, one.num_missing_blocks) == (3, 0, 0)
    assert one.num_ahead is None
    assert one.predicted_start is None


def test_queued_sequence_reports_its_place_and_missing_blocks() -> None:
    bench = CoreBench(num_blocks=8)
    bench.submit("runs", prompt(6 * BLOCK), 8)
    bench.step()
    bench.submit("next", prompt(4 * BLOCK, 500), 4)
    bench.submit("last", prompt(5 * BLOCK, 900), 4)
    bench.step()
    [one] = explanation_of(bench, "last").sequences
    assert one.status is SequenceStatus.QUEUED
    assert one.num_ahead == 1
    kept = bench.scheduler.capacity.reserve(bench.replica, bench.scheduler.sequences("last")[0])
    assert kept > 0
    assert one.num_missing_blocks == 5 + kept - bench.replica.kv.num_available
    assert explanation_of(bench, "last").num_waiting == 2


def test_queued_sequence_reports_its_predicted_start_once_rates_are_known() -> None:
    bench = CoreBench(max_sequences=1)
    bench.submit("runs", prompt(8), 20)
    bench.submit("next", prompt(8, 500), 2)
    bench.submit("last", prompt(8, 900), 2)
    assert explanation_of(bench, "last").sequences[0].predicted_start is None
    bench.step(busy_seconds=0.1)
    start = explanation_of(bench, "last").sequences[0].predicted_start
    assert start is not None
    assert start > 0


def test_a_refusal_by_deadline_has_the_wait_that_explain_predicts() -> None:
    bench = CoreBench(max_sequences=1)
    bench.submit("runs", prompt(8), 400)
    for number in range(4):
        bench.submit(f"waits {number}", prompt(8, 100 * number + 500), 50)
    bench.step(busy_seconds=0.1)
    bench.now += 2.0
    rates, tokens = bench.scheduler.rates(bench.now), prompt(8, 5000)
    own = len(tokens) * rates.prefill_seconds_per_token + 2 * rates.decode_seconds_per_token
    left = own + 0.001
    late = Request("late", tokens, 1, 2, arrived_at=bench.now, deadline=bench.now + left)
    refusal = bench.scheduler.check(late, bench.now)
    bench.submit("later", tokens, 2)
    [one] = explanation_of(bench, "later").sequences
    assert refusal is not None
    assert refusal.retry_after is not None
    assert one.predicted_start is not None
    assert refusal.retry_after == pytest.approx(one.predicted_start + own - left)
    assert 1 < refusal.retry_after < 300  # neither bound of such a time


def test_a_sequence_that_is_held_back_waits_for_its_account() -> None:
    bench, limits = CoreBench(), AccountLimits("a/", max_running=1)
    for number in range(3):
        bench.submit(str(number), prompt(8, 100 * number), 20, limits=limits)
    bench.step(busy_seconds=0.1)
    bench.now += 2.0
    [one] = explanation_of(bench, "2").sequences
    assert (one.status, one.num_ahead, one.predicted_start) == (SequenceStatus.HELD_BACK, 1, None)
    statuses = {each.key: each.status for each in summaries(bench.scheduler, None, bench.now)}
    held = dict.fromkeys(("1", "2"), SequenceStatus.HELD_BACK)
    assert statuses == held | {"0": SequenceStatus.RUNNING}


def test_prefix_waiter_names_the_request_that_it_waits_for() -> None:
    bench = CoreBench()
    bench.submit("producer", [*prompt(24), 1], 4)
    bench.submit("waiter", [*prompt(24), 2], 4)
    bench.plan()
    [one] = explanation_of(bench, "waiter").sequences
    assert (one.status, one.awaits_key) == (SequenceStatus.WAITING_FOR_PREFIX, "producer")


def test_swapped_sequence_reports_its_host_blocks_and_both_costs() -> None:
    bench, victim = under_pressure(PreemptionMode.SWAP)
    [one] = explanation_of(bench, victim).sequences
    assert one.status is SequenceStatus.SWAPPED
    assert one.num_host_blocks == -(-one.num_computed // BLOCK)
    assert one.num_device_blocks == 0
    assert one.num_preemptions == 1
    assert one.last_preemption is not None
    assert one.last_preemption.method is PreemptionMethod.SWAP


def test_preempted_sequence_waits_in_the_queue() -> None:
    bench, victim = under_pressure(PreemptionMode.RECOMPUTE)
    [one] = explanation_of(bench, victim).sequences
    assert (one.status, one.num_host_blocks, one.num_ahead) == (SequenceStatus.PREEMPTED, 0, 0)
    assert one.last_preemption is not None
    assert one.last_preemption.method is PreemptionMethod.RECOMPUTE


def test_sequence_that_waits_for_its_gateway_is_paused() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(4), 200, has_stop_strings=True)
    bench.steps(STOP_STRING_LEAD)
    assert explanation_of(bench, "a").sequences[0].status is SequenceStatus.PAUSED
    bench.scheduler.acknowledge("a", 0, 10)
    assert explanation_of(bench, "a").sequences[0].status is SequenceStatus.RUNNING


def test_list_is_of_all_or_one_tenant_with_the_furthest_status() -> None:
    bench = CoreBench(max_sequences=2)
    bench.submit("first", prompt(4), 9, n=2, tenant="x")
    bench.steps(2)
    bench.submit("second", prompt(4, 100), 9, tenant="y")
    bench.step()
    lines = list(summaries(bench.scheduler, None, bench.now))
    assert [(line.key, line.status) for line in lines] == [
        ("first", SequenceStatus.RUNNING),
        ("second", SequenceStatus.QUEUED),
    ]
    assert lines[0].num_generated == sum(s.num_output for s in bench.scheduler.sequences("first"))
    assert [line.key for line in summaries(bench.scheduler, "y", bench.now)] == ["second"]
