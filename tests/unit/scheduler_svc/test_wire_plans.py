"""Steps as workers are sent them."""

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.plan import ScheduledSequence, StepPlan
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.wire import plan_to_proto


def sequence(sequence_id: int) -> Sequence:
    return Sequence(sequence_id, Request("k", [1] * 8, 1, 8), 0, 0, [1] * 8)


def schedule_of(*scheduled: ScheduledSequence) -> worker_v1.Schedule:
    return plan_to_proto(StepPlan(1, [], [], list(scheduled)), 1, 1).scheduled


def test_a_schedule_goes_in_columns() -> None:
    first = ScheduledSequence(sequence(7), 4, 3, [20, 21], 4, False)
    second = ScheduledSequence(sequence(9), 8, 1, [], 8, True)
    assert schedule_of(first, second) == worker_v1.Schedule(
        sequence_ids=[7, 9], starts=[4, 8], num_tokens=[3, 1], num_new_blocks=[2, 0], new_block_ids=[20, 21]
    )
    assert schedule_of() == worker_v1.Schedule()


def test_a_sequence_that_computes_a_token_of_a_shared_block_again_does_not_store_it() -> None:
    stores, spares = (
        ScheduledSequence(sequence(7), 4, 3, [], 4, False),
        ScheduledSequence(sequence(9), 7, 1, [], 8, True),
    )
    assert list(schedule_of(stores, spares).cached_tokens) == [
        worker_v1.CachedTokens(schedule_index=1, num_cached_tokens=8)
    ]
