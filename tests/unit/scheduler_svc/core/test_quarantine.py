"""Who may be what workers die of is tried alone; nobody else is harmed by that, and nobody waits for ever."""

from core_bench import BLOCK, CoreBench, keys, prompt
from scheduler_svc.core.inquiry import explain
from scheduler_svc.core.plan import FailedEvent, Failure


def lose_twice(bench: CoreBench, *suspected: str) -> None:
    """Make suspects of requests: two replicas are lost with them in flight, and another one comes."""
    for number, key in enumerate(suspected):
        bench.submit(key, prompt(6, 1000 * number), 8)
    for _ in range(2):
        plan = bench.plan()
        assert plan is not None
        assert sorted(keys(plan)) == sorted(suspected)
        assert bench.lose(bench.replica) == []
        bench.replica = bench.join()


def test_request_is_failed_only_once_a_worker_is_lost_to_it_alone() -> None:
    bench = CoreBench()
    lose_twice(bench, "deadly")
    bench.plan()
    [failed] = bench.lose(bench.replica)
    assert (failed.request.key, failed.reason) == ("deadly", Failure.QUARANTINED)
    assert not list(bench.scheduler.keys)


def test_a_replica_that_was_to_end_anyway_accuses_nobody() -> None:
    bench = CoreBench()
    lose_twice(bench, "tried")
    bench.plan()
    bench.scheduler.retire(bench.replica)
    assert bench.lose(bench.replica) == []
    assert bench.scheduler.is_live("tried")


def test_each_suspect_is_judged_by_its_own_trial() -> None:
    bench = CoreBench()
    lose_twice(bench, "first", "waits")
    bench.plan()
    assert [event.request.key for event in bench.lose(bench.replica)] == ["first"]
    bench.replica = bench.join()
    bench.plan()
    assert [event.request.key for event in bench.lose(bench.replica)] == ["waits"], (
        "this is the first that it has alone"
    )


def test_innocent_ones_end_although_they_were_beside_a_deadly_one() -> None:
    bench = CoreBench()
    lose_twice(bench, "first", "deadly", "last")
    failed = []
    for _ in range(200):
        plan = bench.plan()
        if plan is None:
            break
        if "deadly" in keys(plan):
            assert keys(plan) == ["deadly"]
            assert len(bench.replica.in_flight) == 1
            failed += bench.lose(bench.replica)
            bench.replica = bench.join()
        else:
            bench.commit()
    assert [event.request.key for event in failed] == ["deadly"]
    assert not list(bench.scheduler.keys)


def test_nothing_is_in_flight_beside_a_suspect() -> None:
    bench = CoreBench()
    lose_twice(bench, "suspect")
    bench.submit("other", prompt(6, 9000), 8)
    plans = []
    while list(bench.scheduler.keys):
        while (plan := bench.plan()) is not None:
            plans.append(keys(plan))
            is_isolated = len(plans) < 3 and "suspect" in plans[-1]
            assert not is_isolated or (plans[-1] == ["suspect"] and len(bench.replica.in_flight) == 1)
        bench.commit()
    assert ["suspect"] in plans
    assert ["suspect", "other"] in [sorted(each, reverse=True) for each in plans], "a token ends the suspicion"


def test_others_have_a_step_between_two_of_a_suspect() -> None:
    bench = CoreBench(max_step_tokens=8)
    bench.submit("suspect", prompt(40), 4)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join(max_step_tokens=8)
    bench.submit("other", prompt(4, 5000), 30)
    order = [keys(bench.step())[0] for _ in range(8)]
    assert order == ["suspect", "other"] * 4 or order == ["other", "suspect"] * 4


def test_suspects_take_turns_on_one_replica_and_all_end() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b", "c")
    trials = []
    while list(bench.scheduler.keys):
        plan = bench.step()
        if len(set(keys(plan))) == 1 and plan.scheduled[0].start == 0:
            trials += keys(plan)
    assert trials == ["a", "b", "c"]


def test_suspect_goes_to_a_replica_that_runs_nothing() -> None:
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


def test_suspect_is_tried_beside_those_who_run_where_no_replica_is_idle() -> None:
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


def test_siblings_are_set_apart_with_the_one_that_was_in_flight() -> None:
    bench = CoreBench()
    sequences = bench.submit("deadly", prompt(2 * BLOCK), 8, n=3)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join()
    while untried := [s for s in sequences if not s.num_output]:
        planned = [part.sequence for part in bench.step().scheduled]
        assert len(planned) == 1 or not any(s in untried for s in planned)
    bench.run()
    assert all(s.num_output == 8 for s in sequences)


def test_tokens_of_its_siblings_do_not_clear_a_deadly_sequence() -> None:
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
    assert not bench.scheduler.waiting.quarantine.has_losses


def test_sequence_that_is_ended_by_a_verdict_is_suspected_no_more() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(6), 8, n=2)
    for _ in range(2):
        bench.plan()
        bench.lose(bench.replica)
        bench.replica = bench.join()
    for index in range(2):
        assert bench.scheduler.waiting.quarantine.has_suspected
        bench.scheduler.finish("a", index, 0)
    assert not bench.scheduler.waiting.quarantine.has_losses


def test_suspect_that_is_cancelled_leaves_nothing_behind() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b")
    bench.scheduler.cancel("a")
    bench.plan()
    bench.scheduler.cancel("b")
    bench.commit()
    assert bench.scheduler.num_queued == bench.num_used == 0
    assert not bench.scheduler.waiting.quarantine.has_suspected


def test_person_is_told_how_many_suspects_are_tried_before() -> None:
    bench = CoreBench()
    lose_twice(bench, "a", "b", "c")
    bench.step()
    answer = explain(bench.scheduler, "c", bench.now)
    assert answer is not None
    assert answer.sequences[0].num_ahead == 1
