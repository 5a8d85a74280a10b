"""Steps as workers are sent them."""

import pytest

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.results import PROMPT_LOGPROBS, PromptComputation, ResultForm, ResultKind
from scheduler_svc.core.step import MemoryPressure, NewSequence, ScheduledSequence, StepPlan
from scheduler_svc.step_wire import highest_pressure, plan_to_proto, pressure_from_proto, shape_from_proto


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


EMBEDDING = ResultKind("embedding", ResultForm.VALUE)


@pytest.mark.parametrize(
    ("kind", "needs_prompt_logprobs", "is_sent"),
    [(EMBEDDING, False, True), (PROMPT_LOGPROBS, True, True), (PROMPT_LOGPROBS, False, False)],
)
def test_a_new_sequence_has_its_other_results(kind: ResultKind, needs_prompt_logprobs: bool, is_sent: bool) -> None:
    """Once all log-probabilities of the prompt are there, and of further sequences, it is tokens alone."""
    asked = worker_v1.ResultKind(prompt_logprobs=worker_v1.PromptLogprobsResult(num_top_logprobs=3))
    request = Request("k", [1] * 8, 1, 8, sampling=worker_v1.SamplingParams(), result=kind, result_params=asked)
    new = NewSequence(Sequence(7, request, 0, 0, [1] * 8), [1] * 8, needs_prompt_logprobs)
    [sent] = plan_to_proto(StepPlan(1, [], [new], []), 1, 1).new_sequences
    assert sent.HasField("result") is is_sent
    assert not is_sent or sent.result == asked


def computed(computation: worker_v1.PromptComputation, **kind: object) -> worker_v1.ComputedResult:
    return worker_v1.ComputedResult(result=worker_v1.ResultKind(**kind), computation=computation)  # type: ignore[arg-type]


def shape_of(*results: worker_v1.ComputedResult) -> ReplicaShape:
    return shape_from_proto(worker_v1.DescribeResponse(context_length=9, computed_results=results))


def test_a_worker_reports_which_results_it_computes_and_how() -> None:
    shape = shape_of(
        computed(worker_v1.PROMPT_COMPUTATION_CHUNKED, tokens=worker_v1.TokensResult()),
        computed(worker_v1.PROMPT_COMPUTATION_INDIVISIBLE, embedding=worker_v1.EmbeddingResult()),
        computed(worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV, score=worker_v1.ScoreResult()),
        computed(worker_v1.PROMPT_COMPUTATION_CHUNKED),  # of a later release
    )
    assert shape.results == {
        "tokens": PromptComputation.CHUNKED,
        "embedding": PromptComputation.INDIVISIBLE,
        "score": PromptComputation.INDIVISIBLE_WITHOUT_KV,
    }
    assert shape_of().results == {"tokens": PromptComputation.CHUNKED}


def test_a_worker_reports_the_longest_prompt_of_one_step() -> None:
    description = worker_v1.DescribeResponse(max_step_tokens=8, max_indivisible_tokens=40)
    assert (shape_from_proto(description).max_step_tokens, shape_from_proto(description).longest_indivisible) == (8, 40)
    assert shape_from_proto(worker_v1.DescribeResponse(max_step_tokens=8)).longest_indivisible == 8


def test_a_worker_reports_how_many_tokens_a_step_usually_has() -> None:
    assert shape_from_proto(worker_v1.DescribeResponse(max_step_tokens=8, usual_step_tokens=5)).usual_step_tokens == 5


def test_blocks_do_not_limit_the_length_where_none_are_used() -> None:
    embedding = worker_v1.EmbeddingResult()
    without_kv = computed(worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV, embedding=embedding)
    assert (shape_of(without_kv).max_length, shape_of().max_length) == (9, 0)


def test_discarded_blocks_are_sent() -> None:
    plan = StepPlan(1, [], [], [], discarded_block_ids=[4, 5], discarded_host_block_ids=[9])
    sent = plan_to_proto(plan, 1, 1)
    assert (list(sent.discarded_block_ids), list(sent.discarded_host_block_ids)) == ([4, 5], [9])


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (worker_v1.MEMORY_PRESSURE_UNSPECIFIED, None),
        (worker_v1.MEMORY_PRESSURE_NONE, MemoryPressure.NONE),
        (worker_v1.MEMORY_PRESSURE_HIGH, MemoryPressure.HIGH),
        (worker_v1.MEMORY_PRESSURE_CRITICAL, MemoryPressure.CRITICAL),
        (77, None),  # of a later release
    ],
)
def test_a_worker_reports_how_short_its_memory_is(
    reported: worker_v1.MemoryPressure, expected: MemoryPressure | None
) -> None:
    assert pressure_from_proto(reported) is expected


def test_the_highest_of_what_workers_have_measured() -> None:
    assert highest_pressure(list(MemoryPressure)) == worker_v1.MEMORY_PRESSURE_CRITICAL
    assert highest_pressure([MemoryPressure.HIGH, MemoryPressure.NONE]) == worker_v1.MEMORY_PRESSURE_HIGH
    assert highest_pressure([]) == worker_v1.MEMORY_PRESSURE_NONE


def test_a_worker_reports_whether_its_blocks_are_in_host_memory() -> None:
    assert not shape_from_proto(worker_v1.DescribeResponse()).has_kv_in_host_memory
    assert shape_from_proto(worker_v1.DescribeResponse(has_kv_in_host_memory=True)).has_kv_in_host_memory
