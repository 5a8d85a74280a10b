"""A retired replica accepts no sequences, and its sequences continue on another replica without a loss."""

from core_bench import SHAPE, CoreBench, keys, prompt
from memory_worker import MemoryWorker
from scheduler_svc.core.events import TokensEvent
from scheduler_svc.core.kv.prefix_index import extend_hashes, root_hash
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request
from scheduler_svc.core.scheduler import Scheduler


def test_sequences_leave_for_another_replica_with_their_committed_tokens() -> None:
    bench = CoreBench()
    [sequence] = bench.submit("a", prompt(9), 20)
    bench.step()
    bench.plan()
    second = bench.join()
    bench.scheduler.retire(bench.replica)
    assert not bench.replica.running
    assert not bench.replica.is_idle, "a step names it still"
    bench.commit()
    assert sequence.num_output == 2, "what was in flight counts"
    assert bench.step().finished_ids == [sequence.id]
    assert bench.replica.is_idle
    plan = bench.plan(second)
    assert plan is not None
    assert (keys(plan), plan.num_tokens) == (["a"], 11)
    assert bench.lose(bench.replica) == []


def test_sequences_stay_if_there_is_no_other_replica() -> None:
    bench = CoreBench()
    [sequence] = bench.submit("a", prompt(9), 20)
    bench.step()
    bench.scheduler.retire(bench.replica)
    bench.submit("b", prompt(9, 100), 20)
    assert keys(bench.step()) == ["a"]
    assert sequence.phase is Phase.RUNNING
    assert bench.scheduler.num_queued == 1


def test_sequences_leave_as_soon_as_another_replica_is_added() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(9), 20)
    bench.step()
    bench.scheduler.retire(bench.replica)
    second = bench.join()
    assert bench.replica.is_idle
    assert keys(bench.step(at=second)) == ["a"]


def test_retired_replica_takes_no_sequences() -> None:
    bench = CoreBench()
    second = bench.join()
    bench.scheduler.retire(second)
    bench.submit("a", prompt(9), 20)
    bench.step()
    bench.scheduler.retire(bench.replica)
    assert keys(bench.step()) == ["a"]


def test_swapped_kv_is_dropped_and_its_sequences_are_queued() -> None:
    bench = CoreBench(num_blocks=30, preemption=PreemptionMode.SWAP)
    for place in range(4):
        bench.submit(f"{place}", prompt(8, 1000 * place), 60)
    while not bench.step().preempted:
        pass
    assert bench.replica.swapped
    bench.plan()
    second = bench.join()
    bench.scheduler.retire(bench.replica)
    assert not bench.replica.swapped
    while bench.replica.steps_in_flight:
        bench.commit()
    bench.step()
    assert bench.replica.is_idle
    assert bench.replica.kv.host.counts.used == bench.num_used == 0
    for _ in range(2):
        bench.step(at=second)
    assert len(second.running) == 4


def test_replica_is_idle_once_its_worker_has_the_finished_ids() -> None:
    bench = CoreBench()
    bench.join()
    bench.submit("a", prompt(9), 20)
    bench.step()
    bench.scheduler.retire(bench.replica)
    assert bench.plan() is not None
    assert not bench.replica.is_idle
    bench.commit()
    assert bench.replica.is_idle
    assert bench.plan() is None


def test_rates_are_of_replicas_that_are_not_retired() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(9), 20)
    bench.step(busy_seconds=0.1)
    bench.now = 2.0
    assert bench.scheduler.rates(bench.now).tokens_per_second > 0
    bench.scheduler.retire(bench.replica)
    assert bench.scheduler.rates(bench.now).tokens_per_second == 0


def test_search_ends_on_a_retired_replica_although_its_beams_were_not_forked_when_it_was_retired() -> None:
    scheduler, replica = Scheduler(SchedulerLimits(max_sequences=4)), Replica(SHAPE)
    worker = MemoryWorker(SHAPE.num_blocks, SHAPE.block_size, 1000, SHAPE.num_host_blocks)
    scheduler.add_replica(replica)
    for number in range(2):
        scheduler.submit(Request(f"{number}", prompt(4, 20 * number), 1, 6), 0.0)
    beam = BeamParams(2, 1.0, EarlyStopping.NEVER)
    scheduler.submit(Request("beams", prompt(4, 100), 2, 12, beam=beam), 0.0)
    ended = []
    while list(scheduler.keys):
        plan = scheduler.schedule(replica, 0.0)
        assert plan is not None, "requests are stuck"
        scheduler.retire(replica)  # all requests run here by now
        events = scheduler.commit(replica, worker.step(plan), 0.0)
        ended += [e.sequence.request.key for e in events if isinstance(e, TokensEvent) and e.end is not None]
    assert ended == ["0", "1", "beams", "beams"]


def test_last_replica_of_a_version_that_was_replaced_admits_what_is_queued() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(9), 3)
    bench.step()
    assert not bench.scheduler.supersede(), "a replica takes new sequences"
    bench.scheduler.retire(bench.replica)
    bench.submit("b", prompt(9, 100), 3)
    assert bench.scheduler.supersede()
    assert not bench.scheduler.supersede(), "it is known"
    assert keys(bench.step()) == ["a", "b"]


def test_preempted_sequence_returns_to_the_last_replica_of_its_version() -> None:
    bench = CoreBench(num_blocks=30, num_host_blocks=0, preemption=PreemptionMode.RECOMPUTE)
    for place in range(4):
        bench.submit(f"{place}", prompt(8, 1000 * place), 60)
    while not bench.step().preempted:
        pass
    bench.scheduler.retire(bench.replica)
    bench.scheduler.supersede()
    while list(bench.scheduler.keys):
        bench.step()
    assert bench.scheduler.num_queued == 0


def test_replica_that_is_no_longer_the_last_one_gives_up_its_sequences() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(9), 20)
    bench.step()
    bench.scheduler.retire(bench.replica)
    bench.scheduler.supersede()
    second = bench.join()
    bench.submit("b", prompt(9, 100), 20)
    assert bench.step().scheduled == []
    assert sorted(keys(bench.step(at=second))) == ["a", "b"]


def test_sequences_of_several_replicas_are_hashed_anew_for_one_with_another_block_size() -> None:
    bench = CoreBench(policy="fair", max_sequences=1)
    old = [bench.replica, bench.join(max_sequences=1)]
    sequences = [bench.submit(f"{place}", prompt(200, 1000 * place), 8)[0] for place in range(2)]
    for replica in old:
        bench.plan(replica)
        bench.scheduler.retire(replica)
    assert bench.scheduler.supersede()
    new = bench.join(block_size=2 * SHAPE.block_size)
    for replica in old:
        bench.commit(at=replica)
    while list(bench.scheduler.keys):
        bench.step(at=new)
    for sequence in sequences:
        expected: list[bytes] = []
        root = root_hash(SHAPE.fingerprint, b"")
        extend_hashes(expected, root, sequence.tokens, 2 * SHAPE.block_size, len(sequence.block_hashes))
        assert sequence.block_hashes == expected
        assert len(expected) > 10
