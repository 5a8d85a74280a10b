"""What is asked before a request is submitted is answered as `submit` would answer it, and changes nothing."""

import pytest

from core_bench import CoreBench, prompt
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.beam_search import BeamParams, EarlyStopping
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.plan import Failure
from scheduler_svc.core.sequence import Request

REFUSED = {
    Failure.KEY_IN_USE: Request("waits", prompt(4), 1, 4),
    Failure.INVALID: Request("a", [], 1, 4),
    Failure.CONTEXT_LENGTH_EXCEEDED: Request("a", prompt(4), 1, 100_000),
    Failure.UNAVAILABLE: Request("a", prompt(4), 1, 4),
}


def full() -> CoreBench:
    """One request waits, and no other may."""
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits(max_requests=1)))
    bench.submit("waits", prompt(4))
    return bench


@pytest.mark.parametrize("reason", REFUSED)
def test_check_says_what_submit_says(reason: Failure) -> None:
    bench = full()
    refused = bench.scheduler.check(REFUSED[reason], 0.0)
    assert refused is not None
    assert refused.reason is reason
    assert refused == bench.scheduler.submit(REFUSED[reason], 0.0)


def test_search_that_is_too_wide_is_refused_by_both() -> None:
    bench = CoreBench(max_sequences=4)
    wide = Request("a", prompt(4), 1, 4, beam=BeamParams(5, 1.0, EarlyStopping.NEVER))
    refused = bench.scheduler.check(wide, 0.0)
    assert refused is not None
    assert refused == bench.scheduler.submit(wide, 0.0)


def test_request_that_was_accepted_before_is_taken_by_a_full_queue() -> None:
    assert full().scheduler.check(REFUSED[Failure.UNAVAILABLE], 0.0, is_restored=True) is None


def test_request_that_was_only_checked_does_not_wait() -> None:
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits(max_requests=1)))
    for _ in range(2):
        assert bench.scheduler.check(Request("a", prompt(4), 1, 4), 0.0) is None
    assert (bench.scheduler.num_queued, list(bench.scheduler.keys)) == (0, [])
    bench.submit("a", prompt(4))
