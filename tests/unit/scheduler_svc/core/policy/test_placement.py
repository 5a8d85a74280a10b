"""A sequence is placed on the replica where it is predicted to finish first."""

from core_bench import BLOCK, CoreBench, keys, prompt
from scheduler_svc.core.replica import Replica

PREFIX = prompt(40 * BLOCK, 50_000)


def two() -> tuple[CoreBench, Replica, Replica]:
    bench = CoreBench()
    return bench, bench.replica, bench.join()


def with_prefix() -> tuple[CoreBench, Replica, Replica]:
    """The second replica has the prefix in its cache; nothing runs on either."""
    bench, first, second = two()
    bench.submit("before", PREFIX, 1)
    while "before" in bench.scheduler.keys:
        bench.step(at=second)
    assert (len(first.kv.device.index), len(second.kv.device.index)) == (0, 40)
    return bench, first, second


def load(bench: CoreBench, replica: Replica, count: int) -> None:
    """Makes this many sequences decode on a replica, while the others accept none."""
    others = [other for other in bench.scheduler.replicas if other is not replica]
    for other in others:
        other.is_retired = True
    for number in range(count):
        bench.submit(f"load {number}", prompt(2, 10 * number), 900)
    while any(s.num_output < 1 for key in bench.scheduler.keys for s in bench.scheduler.sequences(key)):
        bench.step(at=replica)
    for other in others:
        other.is_retired = False


def replica_of(bench: CoreBench, key: str) -> Replica | None:
    sequence = bench.scheduler.sequences(key)[0]
    return next((replica for replica in bench.scheduler.replicas if replica.holds(sequence)), None)


def test_sequences_spread_over_equal_replicas() -> None:
    bench, first, second = two()
    for number in range(6):
        bench.submit(str(number), prompt(4, 100 * number), 20)
    bench.plan(first)
    assert [len(first.running), len(second.running)] == [3, 3]
    assert bench.scheduler.take_placed() == [second]
    assert bench.scheduler.take_placed() == []
    plan = bench.plan(second)
    assert plan is not None
    assert keys(plan) == ["1", "3", "5"]


def test_sequence_goes_to_its_cached_prefix() -> None:
    bench, first, second = with_prefix()
    bench.submit("again", [*PREFIX, 1], 4)
    bench.plan(first)
    assert replica_of(bench, "again") is second


def test_load_outweighs_a_prefix() -> None:
    bench, first, second = with_prefix()
    load(bench, second, 12)
    bench.submit("again", [*PREFIX, 1], 400)
    bench.plan(first)
    assert replica_of(bench, "again") is first


def test_prefix_outweighs_a_load_that_costs_less() -> None:
    bench, first, second = with_prefix()
    load(bench, second, 2)
    bench.submit("again", [*PREFIX, 1], 4)
    bench.plan(first)
    assert replica_of(bench, "again") is second


def test_sequence_waits_for_its_prefix_on_the_replica_that_computes_it() -> None:
    bench, first, second = two()
    bench.submit("producer", [*PREFIX, 1], 4)
    bench.plan(second)
    [producer] = bench.scheduler.sequences("producer")
    assert second.holds(producer)
    [waiter] = bench.submit("waiter", [*PREFIX, 2], 4)
    bench.plan(first)
    assert bench.scheduler.waiting.prefix_waiters.producer_of(waiter) is producer


def test_replica_without_room_is_not_chosen_although_it_caches_the_prefix() -> None:
    bench, first, second = with_prefix()
    load(bench, second, second.shape.max_sequences)
    bench.submit("again", [*PREFIX, 1], 4)
    assert bench.plan(second) is not None
    assert replica_of(bench, "again") is None
    bench.plan(first)
    assert replica_of(bench, "again") is first


def test_slower_replica_gets_fewer_sequences() -> None:
    bench, fast, slow = two()
    for replica, seconds in ((fast, 0.01), (slow, 0.1)):
        for num_decodes in range(1, 9):
            for _ in range(20):
                replica.costs.observe_step(0, num_decodes, seconds * num_decodes)
                replica.costs.observe_step(64, 0, seconds * 8)
    for number in range(8):
        bench.submit(str(number), prompt(4, 100 * number), 20)
    bench.plan(slow)
    assert len(fast.running) > 2 * len(slow.running)
    assert len(fast.running) + len(slow.running) == 8


def test_order_of_the_queue_holds_over_all_replicas() -> None:
    bench = CoreBench(max_sequences=2, policy="priority")
    second = bench.join(max_sequences=2)
    for number in range(6):
        bench.submit(str(number), prompt(4, 100 * number), 20, priority=number)
    bench.plan(bench.replica)
    bench.plan(second)
    running = {s.request.key for replica in (bench.replica, second) for s in replica.running}
    assert running == {"5", "4", "3", "2"}


def test_prefix_waiters_on_several_replicas_all_end() -> None:
    bench, first, second = two()
    for number in range(40):
        bench.submit(str(number), prompt(10, 100 * number), 5)
    while list(bench.scheduler.keys):
        planned = [replica for replica in (first, second) if bench.plan(replica) is not None]
        assert planned, "requests are stuck"
        for replica in planned:
            bench.commit(at=replica)
    assert bench.num_used == 0


def test_retired_replica_is_given_nothing() -> None:
    bench, first, second = two()
    bench.scheduler.retire(second)
    for number in range(6):
        bench.submit(str(number), prompt(4, 100 * number), 20)
    assert bench.plan(second) is None
    bench.plan(first)
    assert len(first.running) == 6
