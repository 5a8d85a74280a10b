"""Restored requests continue after their known tokens."""

import pytest

from core_bench import TOKEN, CoreBench, keys, prompt
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.events import Failure, MaxTokens, TokensEvent
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.request import STOP_STRING_LEAD, BeamParams, EarlyStopping, Phase, Request, RestoredSequence
from scheduler_svc.core.scheduler import Scheduler


def restore(bench: CoreBench, request: Request, *restored: RestoredSequence) -> None:
    assert bench.scheduler.submit(request, bench.now, restored) is None


def grown(bench: CoreBench) -> list[tuple[int, int, list[int]]]:
    """Index, offset and tokens of all events until no request is live."""
    events = [event for event in bench.run() if isinstance(event, TokensEvent)]
    return [(event.sequence.index, event.offset, list(event.token_ids)) for event in events]


def test_sequence_continues_behind_its_tokens() -> None:
    bench = CoreBench()
    restore(bench, Request("a", prompt(6), 1, 5), RestoredSequence([1, 2, 3], False))
    plan = bench.plan()
    assert plan is not None
    assert plan.new_sequences[0].tokens == [*prompt(6), 1, 2, 3]
    assert plan.num_tokens == 9
    assert grown(bench) == [(0, 3, [TOKEN]), (0, 4, [TOKEN])]


def test_each_sequence_continues_where_it_was() -> None:
    bench = CoreBench()
    restore(
        bench,
        Request("a", prompt(6), 3, 3),
        RestoredSequence([1, 2], False),
        RestoredSequence([], False),
        RestoredSequence([5], False),
    )
    assert sorted(grown(bench)) == [
        (0, 2, [TOKEN]),
        *((1, i, [TOKEN]) for i in range(3)),
        (2, 1, [TOKEN]),
        (2, 2, [TOKEN]),
    ]


def test_sequence_that_ended_is_not_computed() -> None:
    bench = CoreBench()
    restore(bench, Request("a", prompt(6), 2, 3), RestoredSequence([1], True), RestoredSequence([5], False))
    ended, other = bench.scheduler.sequences("a")
    assert (ended.phase, ended.tokens[6:]) == (Phase.ENDED, [1])
    assert [index for index, _, _ in grown(bench)] == [1, 1]
    assert other.phase is Phase.ENDED


def test_request_is_not_live_if_all_sequences_have_ended() -> None:
    bench = CoreBench()
    restore(bench, Request("a", prompt(6), 2, 3), RestoredSequence([1], True), RestoredSequence([], True))
    assert not bench.scheduler.is_live("a")
    assert bench.plan() is None
    assert bench.scheduler.waiting.admission.num_requests == 0


def test_restored_request_is_accepted_despite_a_full_queue_and_its_deadline() -> None:
    bench = CoreBench(limits=SchedulerLimits(policy="fcfs", queue=AdmissionLimits(max_requests=1)))
    bench.submit("waits", prompt(6), 3)
    bench.step(busy_seconds=5.0)
    bench.submit("waits too", prompt(6, 100), 3)
    restore(bench, Request("a", prompt(6, 500), 1, 3, deadline=0.001), RestoredSequence([1], False))
    assert bench.scheduler.is_live("a")


def test_restored_request_ends_where_a_smaller_context_does() -> None:
    bench = CoreBench(num_blocks=4)
    restore(bench, Request("a", prompt(12), 2, 9), RestoredSequence([1], False), RestoredSequence([1] * 8, True))
    assert grown(bench) == [(0, place, [TOKEN]) for place in (1, 2, 3)]


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", prompt(12), 1, 9),
        Request("a", prompt(12), 2, 9, beam=BeamParams(2, 1.0, EarlyStopping.NEVER)),
    ],
)
def test_restored_request_for_which_there_is_no_room_is_rejected(request_: Request) -> None:
    bench = CoreBench(num_blocks=4)
    known = [] if request_.beam else [1] * 4
    refused = bench.scheduler.submit(request_, 0.0, [RestoredSequence(known, False)])
    assert refused is not None
    assert refused.reason is Failure.CONTEXT_LENGTH_EXCEEDED


def test_search_starts_over() -> None:
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits(max_requests=1)))
    bench.submit("waits", prompt(6, 100), 3)
    beam = BeamParams(2, 1.0, EarlyStopping.NEVER)
    restore(bench, Request("beams", prompt(6), 2, 3, beam=beam), RestoredSequence([], False))
    plan = bench.plan()
    assert plan is not None
    assert sorted(keys(plan)) == ["beams", "waits"]


def test_tokens_from_before_count_as_searched_for_stop_strings() -> None:
    bench = CoreBench()
    known = RestoredSequence([1] * 100, False)
    restore(bench, Request("a", prompt(6), 1, 300, has_stop_strings=True), known)
    bench.steps(2)
    for _ in range(STOP_STRING_LEAD - 2):
        bench.step()
    while bench.plan() is not None:
        bench.commit()
    [sequence] = bench.scheduler.sequences("a")
    assert sequence.num_output == 100 + STOP_STRING_LEAD


def test_max_tokens_counts_the_tokens_from_before() -> None:
    bench = CoreBench()
    restore(
        bench,
        Request("a", prompt(6), 1, 3, min_tokens=3, stop_token_ids=frozenset({TOKEN})),
        RestoredSequence([1, 2], False),
    )
    [event] = bench.run()
    assert isinstance(event, TokensEvent)
    assert event.end == MaxTokens()


@pytest.mark.parametrize("token_ids", [[1, 2, 3], [1, 9]])
def test_complete_sequence_must_be_marked_as_ended(token_ids: list[int]) -> None:
    request = Request("a", prompt(6), 1, 3, stop_token_ids=frozenset({9}))
    with pytest.raises(AssertionError):
        CoreBench().scheduler.submit(request, 0.0, [RestoredSequence(token_ids, False)])


def test_requests_are_accepted_without_replicas() -> None:
    scheduler = Scheduler(SchedulerLimits())
    assert scheduler.submit(Request("a", prompt(6), 1, 3), 0.0, [RestoredSequence([1], False)]) is None
    bench = CoreBench(num_blocks=8)
    bench.lose(bench.replica)
    assert bench.scheduler.context_length == 32
    bench.submit("a", prompt(6), 3)
    refused = bench.scheduler.submit(Request("b", prompt(40), 1, 3), 0.0)
    assert refused is not None
    assert refused.reason is Failure.CONTEXT_LENGTH_EXCEEDED
