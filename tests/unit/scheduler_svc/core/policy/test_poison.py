"""Requests that may crash workers run isolated, harm no others, and all requests end."""

from core_bench import BLOCK, CoreBench, keys, prompt
from scheduler_svc.core.events import FailedEvent, Failure
from scheduler_svc.core.explain import explain
from scheduler_svc.core.policy.preemption import MIN_STEPS
from scheduler_svc.core.request import Phase


def lose_twice(bench: CoreBench, *suspected: str) -> None:
    """Makes requests suspected: two replicas are lost with them in flight, and another one is added."""
    for number, key in enumerate(suspected):
        bench.submit(key, prompt(6, 1000 * number), 8)
    for _ in range(2):
        plan = bench.plan()
        assert plan is not None
        assert sorted(keys(plan)) == sorted(suspected)
        assert bench.lose(bench.replica) == []
        bench.replica = bench.join()


def test_request_fails_only_when_a_worker_is_lost_to_it_alone() -> None:
    bench = CoreBench()
    lose_twice(bench, "poison")
    bench.plan()
    [failed] = bench.lose(bench.replica)
    assert (failed.request.key, failed.reason) == ("poison", Failure.QUARANTINED)
    assert not list(bench.scheduler.keys)


def test_loss_of_a_retired_replica_does_not_count() -> None:
    bench = CoreBench()
    lose_twice(bench, "suspected")
    bench.plan()
    bench.scheduler.retire(bench.replica)
    assert bench.lose(bench.replica) == []
    assert bench.scheduler.is_live("suspected")


def test_each_suspected_request_fails_by_its_own_isolated_run() -> None:
    bench = CoreBench()
    lose_twice(bench, "first", "waits")
    bench.plan()
    assert [event.request.key for event in bench.lose(bench.replica)] == ["first"]
    bench.replica = bench.join()
    bench.plan()
    assert [event.request.key for event in bench.lose(bench.replica)] == ["waits"], "this is its first isolated run"


def test_other_requests_end_although_they_ran_beside_a_poison_one() -> None:
    bench = CoreBench()
    lose_twice(bench, "first", "poison", "last")
    failed = []
    for _ in range(200):
        plan = bench.plan()
        if plan is None:
            break
        if "poison" in keys(plan):
            assert keys(plan) == ["poison"]
            assert len(bench.replica.steps_in_flight) == 1
            failed += bench.lose(bench.replica)
            bench.replica = bench.join()
        else:
            bench.commit()
    assert [event.request.key for event in failed] == ["poison"]
    assert not list(bench.scheduler.keys)


def test_nothing_is_in_flight_beside_an_isolated_step() -> None:
    bench = CoreBench()
    lose_twice(bench, "suspect")
    bench.submit("other", prompt(6, 9000), 8)
    plans = []
    while list(bench.scheduler.keys):
        while (plan := bench.plan()) is not None:
            plans.append(keys(plan))
            is_isolated = len(plans) < 3 and "suspect" in plans[-1]
            assert not is_isolated or (plans[-1] == ["suspect"] and len(bench.replica.steps_in_flight) == 1)
        bench.commit()
    assert ["suspect"] in plans
    assert ["suspect", "other"] in [sorted(each, reverse=True) for each in plans], "a token clears it"


def test_nothing_is_planned_behind_an_isolated_step() -> None:
    bench = CoreBench()
    lose_twice(bench, "suspect")
    bench.submit("other", prompt(6, 9000), 8)
    plan = bench.plan()
    assert plan is not None
    while keys(plan) != ["suspect"]:
        bench.commit()
        plan = bench.plan()
        assert plan is not None
    assert bench.plan() is None
    bench.commit()
    assert bench.plan() is not None


def test_isolated_steps_alternate_with_those_of_others() -> None:
    bench = CoreBench(max_step_tokens=8)
    bench.submit("suspect", prompt(40), 4)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join(max_step_tokens=8)
    bench.submit("other", prompt(4, 5000), 30)
    order = [keys(bench.step())[0] for _ in range(8)]
    assert order == ["suspect", "other"] * 4 or order == ["other", "suspect"] * 4


def test_suspected_requests_run_one_after_another_and_all_end() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b", "c")
    trials = []
    while list(bench.scheduler.keys):
        plan = bench.step()
        if len(set(keys(plan))) == 1 and plan.scheduled[0].start == 0:
            trials += keys(plan)
    assert trials == ["a", "b", "c"]


def test_suspected_request_goes_to_an_idle_replica() -> None:
    bench = CoreBench()
    bench.submit("runs", prompt(4, 7000), 50)
    bench.step()
    bench.submit("suspect", prompt(6), 8)
    for _ in range(2):
        other = bench.join()
        plan = bench.plan(other)
        assert plan is not None
        assert keys(plan) == ["suspect"]
        assert bench.lose(other) == []
    idle = bench.join()
    bench.step()
    assert bench.scheduler.take_placed() == [idle]
    plan = bench.plan(idle)
    assert plan is not None
    assert keys(plan) == ["suspect"]


def test_suspected_request_shares_a_replica_if_none_is_idle() -> None:
    bench = CoreBench()
    bench.submit("runs", prompt(4, 7000), 50)
    bench.step()
    bench.submit("suspect", prompt(6), 8)
    for _ in range(2):
        other = bench.join()
        bench.plan(other)
        bench.lose(other)
    assert [keys(bench.step()) for _ in range(4)] == [["runs"], ["suspect"], ["runs", "suspect"], ["runs", "suspect"]]


def test_token_ends_the_count() -> None:
    bench = CoreBench()
    [sequence] = bench.submit("a", prompt(6), 20)
    for _ in range(6):
        bench.step()
        bench.plan()
        assert bench.lose(bench.replica) == []
        bench.replica = bench.join()
    assert sequence.num_output == 6


def test_siblings_are_suspected_with_the_one_that_was_in_flight() -> None:
    bench = CoreBench()
    sequences = bench.submit("poison", prompt(2 * BLOCK), 8, n=3)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join()
    while untried := [s for s in sequences if not s.num_output]:
        planned = [part.sequence for part in bench.step().scheduled]
        assert len(planned) == 1 or not any(s in untried for s in planned)
    bench.run()
    assert all(s.num_output == 8 for s in sequences)


def test_sibling_without_a_slot_on_another_replica_is_queued_to_run_isolated() -> None:
    bench = CoreBench(policy="fair", max_sequences=1)
    other = bench.join(max_sequences=1)
    sequences = bench.submit("poison", prompt(2 * BLOCK), 100, n=2, weight=0.1)
    bench.step()
    bench.step(at=other)
    [kept] = [s for s in sequences if other.holds(s)]
    for _ in range(MIN_STEPS):
        bench.step(at=other)
    bench.submit("short", prompt(6), 100, tenant="other")
    bench.step(at=other)
    assert other.swapped == [kept]
    for _ in range(2):
        plan = bench.plan()
        assert plan is not None
        assert keys(plan) == ["poison"]
        bench.lose(bench.replica)
        bench.replica = bench.join(max_sequences=1)
    assert kept.phase is Phase.QUEUED
    assert bench.scheduler.poison.is_suspected(kept)


def test_tokens_of_siblings_do_not_clear_a_sequence() -> None:
    bench = CoreBench()
    sequences = bench.submit("a", prompt(6), 8, n=3)
    bench.steps(2)
    failed: list[FailedEvent] = []
    num_losses = 0
    while not failed and num_losses < 10:
        plan = bench.plan()
        assert plan is not None
        if sequences[1] not in [part.sequence for part in plan.scheduled]:
            bench.commit()
            continue
        num_losses += 1
        failed = bench.lose(bench.replica)
        bench.replica = bench.join()
    assert [event.reason for event in failed] == [Failure.QUARANTINED]
    assert num_losses == 3
    assert not bench.scheduler.poison.has_losses


def test_sequence_that_ends_at_a_stop_string_is_cleared() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(6), 8, n=2)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join()
    for index in range(2):
        assert bench.scheduler.poison.has_suspected
        bench.scheduler.finish("a", index, 0)
    assert not bench.scheduler.poison.has_losses


def test_cancelled_suspected_request_leaves_nothing_behind() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b")
    bench.scheduler.cancel("a")
    bench.plan()
    bench.scheduler.cancel("b")
    bench.commit()
    assert bench.scheduler.num_queued == bench.num_used == 0
    assert not bench.scheduler.poison.has_suspected


def test_explanation_counts_the_suspected_requests_ahead() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b", "c")
    bench.step()
    answer = explain(bench.scheduler, "c", bench.now)
    assert answer is not None
    assert answer.sequences[0].num_ahead == 1
