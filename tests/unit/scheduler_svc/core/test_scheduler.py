"""The scheduling rule, one behaviour at a time."""

import pytest

from memory_worker import Drawn, MemoryWorker, continuation
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.events import Event, FailedEvent, Failure, MaxTokens, StopToken, TokensEvent
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import STOP_STRING_LEAD, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import FailureCause, StepOutcome

VOCAB = 1000


class Bench:
    """One scheduler, one replica, one checksum worker."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, max_step_tokens: int = 32, max_sequences: int = 8
    ) -> None:
        shape = ReplicaShape(b"model", block_size, num_blocks, 1000, max_step_tokens, max_sequences)
        self.replica = Replica(shape)
        self.worker = MemoryWorker(num_blocks, block_size, VOCAB)
        self.scheduler = Scheduler(SchedulerLimits(max_step_tokens, max_sequences))
        self.scheduler.add_replica(self.replica)

    def replace_worker(self, **changes: int) -> list[FailedEvent]:
        """The worker is lost, and another one comes. Returns the requests that fail, since it is too small for them."""
        self.scheduler.remove_replica(self.replica)
        other = Bench(**changes)
        self.replica, self.worker = other.replica, other.worker
        return self.scheduler.add_replica(self.replica)

    def step(self) -> list[Event]:
        """Plan one step and commit it at once."""
        plan = self.scheduler.schedule(self.replica, 0.0)
        assert plan is not None
        events = self.scheduler.commit(self.replica, self.worker.step(plan), 0.0)
        self.replica.check_integrity()
        return events

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Steps until nothing is left; returns the tokens of each sequence."""
        outputs: dict[tuple[str, int], list[int]] = {}
        while list(self.scheduler.keys):
            for event in self.step():
                assert isinstance(event, TokensEvent)
                outputs.setdefault((event.sequence.request.key, event.sequence.index), []).extend(event.token_ids)
        return outputs


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % VOCAB for i in range(length)]


def test_prompts_and_decodes_share_a_step() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(5), 1, 4), 0.0)
    bench.step()
    bench.scheduler.submit(Request("b", prompt(6, 50), 1, 4), 0.0)
    plan = bench.scheduler.schedule(bench.replica, 0.0)
    assert plan is not None
    assert [(part.sequence.request.key, part.num_tokens) for part in plan.scheduled] == [("a", 1), ("b", 6)]


def test_long_prompt_is_computed_in_chunks_within_the_token_budget() -> None:
    bench = Bench(max_step_tokens=8)
    bench.scheduler.submit(Request("a", prompt(20), 1, 1), 0.0)
    assert [bench.step() for _ in range(2)] == [[], []]
    [event] = bench.step()
    assert isinstance(event, TokensEvent)
    assert event.end == MaxTokens()
    assert list(event.token_ids) == continuation(prompt(20), 1, VOCAB)


def test_next_step_is_planned_before_the_last_one_is_known() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(5), 1, 3), 0.0)
    first, second = bench.scheduler.schedule(bench.replica, 0.0), bench.scheduler.schedule(bench.replica, 0.0)
    assert first is not None
    assert second is not None
    assert second.scheduled[0].start == 5
    assert bench.scheduler.schedule(bench.replica, 0.0) is None, "only two steps may be in flight"
    bench.scheduler.commit(bench.replica, bench.worker.step(first), 0.0)
    bench.scheduler.commit(bench.replica, bench.worker.step(second), 0.0)
    assert bench.run() == {("a", 0): continuation(prompt(5), 3, VOCAB)[2:]}


def test_sequence_that_will_end_by_length_is_not_planned_again() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(5), 1, 1), 0.0)
    assert bench.scheduler.schedule(bench.replica, 0.0) is not None
    assert bench.scheduler.schedule(bench.replica, 0.0) is None


def test_stop_token_ends_and_the_step_in_flight_is_dropped() -> None:
    bench = Bench()
    tokens = continuation(prompt(5), 10, VOCAB)
    bench.scheduler.submit(Request("a", prompt(5), 1, 10, stop_token_ids=frozenset(tokens[:1])), 0.0)
    first, second = bench.scheduler.schedule(bench.replica, 0.0), bench.scheduler.schedule(bench.replica, 0.0)
    assert first is not None
    assert second is not None
    [event] = bench.scheduler.commit(bench.replica, bench.worker.step(first), 0.0)
    assert isinstance(event, TokensEvent)
    assert event.end == StopToken(tokens[0])
    assert bench.replica.kv.device.counts.used > 0, "the step in flight still names its blocks"
    assert bench.scheduler.commit(bench.replica, bench.worker.step(second), 0.0) == []
    assert bench.replica.kv.device.counts.used == 0
    bench.replica.check_integrity()


def test_stop_token_does_not_count_before_min_tokens() -> None:
    bench = Bench()
    tokens = continuation(prompt(5), 4, VOCAB)
    bench.scheduler.submit(Request("a", prompt(5), 1, 4, stop_token_ids=frozenset(tokens), min_tokens=2), 0.0)
    assert bench.run() == {("a", 0): tokens[:3]}


def test_second_request_reuses_the_prefix_of_the_first() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(11), 1, 1), 0.0)
    bench.run()
    computed = bench.worker.num_computed
    bench.scheduler.submit(Request("b", prompt(9), 1, 1), 0.0)
    events = bench.step()
    assert isinstance(events[0], TokensEvent)
    assert events[0].sequence.num_cached_prompt_tokens == 8
    assert bench.worker.num_computed == computed + 1


def test_full_hit_computes_the_last_token_without_storing_it() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(8), 1, 3), 0.0)
    expected = bench.run()[("a", 0)]
    bench.scheduler.submit(Request("b", prompt(8), 1, 3), 0.0)
    plan = bench.scheduler.schedule(bench.replica, 0.0)
    assert plan is not None
    [part] = plan.scheduled
    assert (part.start, part.num_tokens, part.num_cached_tokens) == (7, 1, 8)
    bench.scheduler.commit(bench.replica, bench.worker.step(plan), 0.0)
    assert bench.run() == {("b", 0): expected[1:]}


@pytest.mark.parametrize("salts", [(b"a", b"b")])
def test_another_tenants_salt_shares_nothing(salts: tuple[bytes, bytes]) -> None:
    bench = Bench()
    for salt in salts:
        bench.scheduler.submit(Request(salt.decode(), prompt(12), 1, 1, salt=salt), 0.0)
        bench.run()
    assert bench.scheduler.totals.cache_hits == 0


def test_blocks_are_published_only_once_their_step_is_committed() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(12), 1, 8), 0.0)
    plan = bench.scheduler.schedule(bench.replica, 0.0)
    assert plan is not None
    assert len(bench.replica.kv.device.index) == 0
    bench.scheduler.commit(bench.replica, bench.worker.step(plan), 0.0)
    assert len(bench.replica.kv.device.index) == 3


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (FailureCause.INTERNAL, Failure.INTERNAL),
        (FailureCause.GRAMMAR_TOO_COMPLEX, Failure.GRAMMAR_TOO_COMPLEX),
        (FailureCause.OUT_OF_MEMORY, Failure.UNAVAILABLE),
    ],
)
def test_blocks_of_a_failed_row_are_not_published_and_only_its_request_fails(
    cause: FailureCause, reason: Failure
) -> None:
    bench = Bench()
    bench.scheduler.submit(Request("bad", prompt(8), 1, 4), 0.0)
    bench.scheduler.submit(Request("good", prompt(8, 100), 1, 4), 0.0)
    plan = bench.scheduler.schedule(bench.replica, 0.0)
    assert plan is not None
    results = list(bench.worker.step(plan).results)
    results[0] = Drawn([], failure="broken", failure_cause=cause)
    failed, grew = bench.scheduler.commit(bench.replica, StepOutcome(results), 0.0)
    assert isinstance(failed, FailedEvent)
    assert (failed.request.key, failed.reason) == ("bad", reason)
    assert isinstance(grew, TokensEvent)
    assert len(bench.replica.kv.device.index) == 2
    bench.replica.check_integrity()


def test_last_arrival_is_preempted_when_blocks_run_out_and_ends_right() -> None:
    bench = Bench(num_blocks=7)
    bench.scheduler.submit(Request("a", prompt(8), 1, 12), 0.0)
    bench.scheduler.submit(Request("b", prompt(8, 100), 1, 12), 0.0)
    outputs = bench.run()
    assert bench.scheduler.totals.preemptions > 0
    assert outputs[("a", 0)] == continuation(prompt(8), 12, VOCAB)
    assert outputs[("b", 0)] == continuation(prompt(8, 100), 12, VOCAB)


def test_higher_priority_is_admitted_first() -> None:
    bench = Bench(max_sequences=1)
    bench.scheduler.submit(Request("low", prompt(4), 1, 1), 0.0)
    bench.scheduler.submit(Request("high", prompt(4, 10), 1, 1, priority=1), 0.0)
    [event] = bench.step()
    assert isinstance(event, TokensEvent)
    assert event.sequence.request.key == "high"


def test_stop_strings_hold_a_sequence_near_what_was_acknowledged() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(4), 1, 200, has_stop_strings=True), 0.0)
    for _ in range(STOP_STRING_LEAD):
        bench.step()
    assert bench.scheduler.schedule(bench.replica, 0.0) is None
    bench.scheduler.acknowledge("a", 0, 1)
    assert bench.scheduler.schedule(bench.replica, 0.0) is not None


def test_finish_ends_one_sequence_only() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(4), 2, 5), 0.0)
    bench.step()
    bench.scheduler.finish("a", 0, 1)
    outputs = bench.run()
    assert outputs == {("a", 1): continuation(prompt(4), 5, VOCAB)}


def test_sequences_of_one_request_compute_its_prompt_once() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=64)
    bench.scheduler.submit(Request("a", prompt(101), 4, 2), 0.0)
    bench.run()
    # 100 tokens are whole blocks, which the other three share; each computes the rest of the prompt and one of its own.
    assert bench.worker.num_computed == 102 + 3 * 2


def test_request_whose_first_sequence_is_cancelled_early_leaves_nothing_behind() -> None:
    bench = Bench(max_step_tokens=8)
    bench.scheduler.submit(Request("a", prompt(30), 3, 2), 0.0)
    bench.step()
    bench.scheduler.cancel("a")
    assert bench.scheduler.num_queued == 0
    assert bench.replica.kv.device.counts.used == 0


def test_deadline_ends_a_request_and_frees_its_blocks() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(4), 1, 100, deadline=10.0), 0.0)
    bench.step()
    assert bench.scheduler.expire(9.0) == []
    [failed] = bench.scheduler.expire(10.5)
    assert failed.reason is Failure.DEADLINE_EXCEEDED
    assert bench.replica.kv.device.counts.used == 0


def test_deadline_of_a_request_that_ended_does_not_end_a_later_one_of_the_same_key() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(5), 1, 1, deadline=5.0), 0.0)
    bench.run()
    bench.scheduler.submit(Request("a", prompt(5), 1, 20), 1.0)
    assert bench.scheduler.expire(6.0) == []
    assert bench.scheduler.is_live("a")


def test_key_of_a_live_request_is_rejected() -> None:
    bench = Bench()
    assert bench.scheduler.submit(Request("a", prompt(4), 1, 5), 0.0) is None
    refused = bench.scheduler.submit(Request("a", prompt(4), 1, 5), 0.0)
    assert refused is not None
    assert refused.reason is Failure.KEY_IN_USE


def test_request_that_never_fits_is_rejected() -> None:
    bench = Bench(num_blocks=4)
    refused = bench.scheduler.submit(Request("a", prompt(12), 1, 5), 0.0)
    assert refused is not None
    assert refused.reason is Failure.CONTEXT_LENGTH_EXCEEDED


def test_lost_worker_loses_no_request() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(9), 1, 6), 0.0)
    first = bench.step()
    bench.scheduler.schedule(bench.replica, 0.0)  # in flight as the worker dies
    assert bench.replace_worker() == []
    assert isinstance(first[0], TokensEvent)
    outputs = bench.run()
    assert [*first[0].token_ids, *outputs[("a", 0)]] == continuation(prompt(9), 6, VOCAB)


def test_sequence_continues_on_a_worker_with_another_block_size() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(9), 1, 6), 0.0)
    first = bench.step()
    assert bench.replace_worker(block_size=8) == []
    assert isinstance(first[0], TokensEvent)
    outputs = bench.run()
    assert [*first[0].token_ids, *outputs[("a", 0)]] == continuation(prompt(9), 6, VOCAB)


def test_sequence_ends_where_the_context_of_a_worker_does_that_came_back_with_fewer_blocks() -> None:
    bench = Bench(num_blocks=4)
    assert bench.scheduler.submit(Request("a", prompt(9), 1, 7), 0.0) is None
    first = bench.step()
    assert bench.replace_worker(num_blocks=3) == []
    assert isinstance(first[0], TokensEvent)
    outputs = bench.run()
    assert [*first[0].token_ids, *outputs[("a", 0)]] == continuation(prompt(9), 7, VOCAB)[:3]


def test_request_without_room_on_a_worker_that_came_back_with_fewer_blocks_fails() -> None:
    bench = Bench(num_blocks=4)
    assert bench.scheduler.submit(Request("a", prompt(9), 1, 7), 0.0) is None
    for _ in range(3):
        bench.step()
    (failed,) = bench.replace_worker(num_blocks=3)
    assert (failed.request.key, failed.reason) == ("a", Failure.CONTEXT_LENGTH_EXCEEDED)


def test_queue_is_bounded() -> None:
    scheduler = Scheduler(SchedulerLimits(32, 8, AdmissionLimits(max_requests=1)))
    assert scheduler.submit(Request("a", prompt(4), 3, 5), 0.0) is None
    refused = scheduler.submit(Request("b", prompt(4), 1, 5), 0.0)
    assert refused is not None
    assert refused.reason is Failure.UNAVAILABLE


def test_outcome_with_a_missing_result_is_an_error() -> None:
    bench = Bench()
    bench.scheduler.submit(Request("a", prompt(4), 1, 5), 0.0)
    bench.scheduler.schedule(bench.replica, 0.0)
    with pytest.raises(ValueError, match="1 sequences, not 0"):
        bench.scheduler.commit(bench.replica, StepOutcome([]), 0.0)
