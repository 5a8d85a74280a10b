"""A check before submission gives the same answer as `submit`, and changes nothing."""

from dataclasses import replace
from typing import Any

import pytest

from core_bench import EMBEDDING, SHAPE, CoreBench, prompt
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.events import Failure
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import BeamParams, EarlyStopping, Request
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, PromptComputation, ResultKind

REFUSED = {
    Failure.KEY_IN_USE: Request("waits", prompt(4), 1, 4),
    Failure.INVALID: Request("a", [], 1, 4),
    Failure.CONTEXT_LENGTH_EXCEEDED: Request("a", prompt(4), 1, 100_000),
    Failure.UNAVAILABLE: Request("a", prompt(4), 1, 4),
}


def full() -> CoreBench:
    """One request waits, and the queue is full."""
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits(max_requests=1)))
    bench.submit("waits", prompt(4))
    return bench


@pytest.mark.parametrize("reason", REFUSED)
def test_check_rejects_what_submit_rejects(reason: Failure) -> None:
    bench = full()
    refused = bench.scheduler.check(REFUSED[reason], 0.0)
    assert refused is not None
    assert refused.reason is reason
    assert refused == bench.scheduler.submit(REFUSED[reason], 0.0)


def test_too_wide_a_search_is_rejected_by_both() -> None:
    bench = CoreBench(max_sequences=4)
    wide = Request("a", prompt(4), 1, 4, beam=BeamParams(5, 1.0, EarlyStopping.NEVER))
    refused = bench.scheduler.check(wide, 0.0)
    assert refused is not None
    assert refused == bench.scheduler.submit(wide, 0.0)


def test_request_that_was_accepted_before_enters_a_full_queue() -> None:
    assert full().scheduler.check(REFUSED[Failure.UNAVAILABLE], 0.0, is_restored=True) is None


def test_request_that_was_only_checked_does_not_wait() -> None:
    bench = CoreBench(limits=SchedulerLimits(queue=AdmissionLimits(max_requests=1)))
    for _ in range(2):
        assert bench.scheduler.check(Request("a", prompt(4), 1, 4), 0.0) is None
    assert (bench.scheduler.num_queued, list(bench.scheduler.keys)) == (0, [])
    bench.submit("a", prompt(4))


CONFLICTS: dict[str, tuple[ResultKind, dict[str, Any]]] = {
    "a value of several sequences": (EMBEDDING, {"n": 2}),
    "a value and tokens": (EMBEDDING, {"max_tokens": 2}),
    "a value and least tokens": (EMBEDDING, {"min_tokens": 1}),
    "a value and stop tokens": (EMBEDDING, {"stop_token_ids": frozenset({1})}),
    "a value and stop strings": (EMBEDDING, {"has_stop_strings": True}),
    "a value of a search": (EMBEDDING, {"beam": BeamParams(2, 1.0, EarlyStopping.NEVER)}),
    "a prompt's log-probabilities of a search": (PROMPT_LOGPROBS, {"beam": BeamParams(2, 1.0, EarlyStopping.NEVER)}),
}


@pytest.mark.parametrize(("kind", "fields"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_results_that_exclude_each_other_are_rejected_by_name(kind: ResultKind, fields: dict[str, Any]) -> None:
    request = replace(Request("a", prompt(4), 1, 1, result=kind), **fields)
    for bench in (CoreBench(), CoreBench(results={kind.name: PromptComputation.CHUNKED})):
        refused = bench.scheduler.check(request, 0.0)
        assert refused is not None
        assert refused.reason is Failure.INVALID
        assert refused.message.startswith(kind.name)


@pytest.mark.parametrize("kind", [EMBEDDING, PROMPT_LOGPROBS, TOKENS])
def test_result_that_no_replica_computes_is_rejected_by_name(kind: ResultKind) -> None:
    bench = CoreBench(results={"something": PromptComputation.CHUNKED})
    request = Request("a", prompt(4), 1, 1, result=kind)
    refused = bench.scheduler.check(request, 0.0)
    assert refused is not None
    assert refused.reason is Failure.UNSUPPORTED_RESULT
    assert refused.message == f"computes no {kind.name}"
    bench.join()
    assert bench.scheduler.check(request, 0.0) is None


def test_request_waits_while_there_is_no_replica() -> None:
    bench = CoreBench()
    bench.lose(bench.replica)
    request = Request("a", prompt(4), 1, 1, result=EMBEDDING)
    assert bench.scheduler.submit(request, 0.0) is None
    [failed] = bench.scheduler.add_replica(Replica(replace(SHAPE, results={TOKENS.name: PromptComputation.CHUNKED})))
    assert (failed.request, failed.reason) == (request, Failure.UNSUPPORTED_RESULT)


@pytest.mark.parametrize("leaves", ["lost", "retired"])
def test_request_fails_with_the_last_replica_that_computes_its_result(leaves: str) -> None:
    bench = CoreBench()
    other = bench.join(results={TOKENS.name: PromptComputation.CHUNKED})
    bench.submit_for_value("a", prompt(4))
    bench.submit("b", prompt(4, 100))
    [failed] = bench.lose(bench.replica) if leaves == "lost" else bench.scheduler.retire(bench.replica)
    assert (failed.request.key, failed.reason) == ("a", Failure.UNSUPPORTED_RESULT)
    assert bench.plan(other) is not None
