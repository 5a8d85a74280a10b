"""Requests for a value of the prompt: they end with the value, also after preemption and faults."""

import pytest

from core_bench import BLOCK, EMBEDDING, VALUE, CoreBench, crowded, keys, prompt
from memory_worker import Drawn
from scheduler_svc.core.events import Event, FailedEvent, Failure, TokensEvent, ValueComputed
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import Phase, Request, RestoredSequence
from scheduler_svc.core.results import TOKENS, PromptComputation
from scheduler_svc.core.step import StepOutcome


def values(events: list[Event]) -> list[tuple[str, object]]:
    """The requests with values; asserts that these are all of their events."""
    found = []
    for event in events:
        if isinstance(event, TokensEvent) and isinstance(event.end, ValueComputed):
            assert (event.offset, list(event.token_ids)) == (0, [])
            found.append((event.sequence.request.key, event.end.value))
    return found


def test_value_ends_its_request_and_frees_its_blocks() -> None:
    bench = CoreBench()
    sequence = bench.submit_for_value("a", prompt(10))
    plan = bench.plan()
    assert plan is not None
    assert (plan.num_tokens, plan.scheduled[0].samples) == (10, True)
    assert values(bench.commit()) == [("a", VALUE)]
    assert (sequence.phase, sequence.tokens) == (Phase.ENDED, prompt(10))
    assert not bench.scheduler.is_live("a")
    assert bench.num_used == 0


def test_no_step_is_planned_behind_the_one_that_returns_the_value() -> None:
    bench = CoreBench()
    bench.submit_for_value("a", prompt(10))
    assert bench.plan() is not None
    assert bench.plan() is None


def test_no_step_is_planned_only_to_end_a_sequence_with_a_value() -> None:
    bench = CoreBench()
    bench.submit_for_value("a", prompt(10))
    bench.step()
    assert bench.plan() is None
    [tokens] = bench.submit("tokens", prompt(4), max_tokens=1)
    assert bench.step().finished_ids == []
    assert bench.step().finished_ids == [tokens.id], "a sequence with tokens is kept until its id is sent"
    assert bench.plan() is None


def test_a_worker_of_protocol_2_is_sent_the_id_of_a_sequence_with_a_value() -> None:
    bench = CoreBench(protocol=2)
    sequence = bench.submit_for_value("a", prompt(10))
    bench.plan()
    assert values(bench.commit()) == [("a", VALUE)]
    assert bench.step().finished_ids == [sequence.id]
    assert bench.plan() is None


def test_worker_is_sent_the_id_of_a_sequence_that_ended_without_its_value() -> None:
    bench = CoreBench()
    cancelled, failed = bench.submit_for_value("a", prompt(10)), bench.submit_for_value("b", prompt(5, 500))
    bench.plan()
    bench.scheduler.cancel("a")
    outcome = StepOutcome([Drawn([]), Drawn([], failure="broken")])
    [event] = bench.scheduler.commit(bench.replica, outcome, 0.0)
    assert isinstance(event, FailedEvent)
    assert bench.step().finished_ids == [cancelled.id, failed.id]
    assert bench.plan() is None


def test_long_prompt_is_computed_in_chunks() -> None:
    bench = CoreBench(max_step_tokens=8)
    bench.submit_for_value("a", prompt(20))
    plans = [bench.plan(), bench.plan()]
    assert [plan is not None and plan.scheduled[0].samples for plan in plans] == [False, False]
    assert values(bench.commit()) == []
    assert values(bench.run()) == [("a", VALUE)]


def test_prefix_comes_from_the_cache_and_stays_there() -> None:
    bench = CoreBench()
    bench.submit("tokens", prompt(2 * BLOCK + 1), max_tokens=1)
    bench.step()
    first = bench.submit_for_value("a", [*prompt(2 * BLOCK), *prompt(2 * BLOCK, 500)])
    plan = bench.step()
    assert (first.num_cached_prompt_tokens, plan.scheduled[0].start) == (2 * BLOCK, 2 * BLOCK)
    [second] = bench.submit("b", [*prompt(2 * BLOCK), *prompt(2 * BLOCK + 1, 500)])
    bench.step()
    assert second.num_cached_prompt_tokens == 4 * BLOCK


def test_whole_prompt_in_the_cache_is_computed_from_its_last_token() -> None:
    bench = CoreBench()
    for key in "ab":
        bench.submit_for_value(key, prompt(2 * BLOCK))
        plan = bench.step()
    assert (plan.num_tokens, bench.scheduler.is_live("b")) == (1, False)


def test_requests_with_the_same_prompt_compute_it_once() -> None:
    bench = CoreBench()
    for key in "ab":
        bench.submit_for_value(key, prompt(2 * BLOCK + 1))
    assert sorted(values(bench.run())) == [("a", VALUE), ("b", VALUE)]
    assert bench.num_computed == 2 * BLOCK + 2


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_prompt_has_its_value(mode: PreemptionMode) -> None:
    bench = crowded(mode)
    sequence = bench.submit_for_value("a", prompt(40, 9000))
    events = bench.run()
    assert sequence.last_preemption is not None
    assert sequence.last_preemption.method.name == mode.name
    assert values(events) == [("a", VALUE)]


def test_prompt_is_computed_again_after_its_worker_is_lost() -> None:
    bench = CoreBench(max_step_tokens=8)
    bench.submit_for_value("a", prompt(20))
    bench.step()
    assert bench.lose(bench.replica) == []
    bench.replica = bench.join(max_step_tokens=8)
    assert values(bench.run()) == [("a", VALUE)]
    assert bench.num_computed == 28


def test_worker_that_speculates_returns_the_value() -> None:
    bench = CoreBench(max_sampled_tokens=4)
    bench.submit_for_value("a", prompt(1))
    plan = bench.plan()
    assert plan is not None
    assert plan.scheduled[0].max_extra_tokens == 0
    assert values(bench.commit()) == [("a", VALUE)]


def test_restored_request_is_computed_unless_its_value_is_known() -> None:
    bench = CoreBench()
    known = Request("known", prompt(5), 1, 1, result=EMBEDDING)
    assert bench.scheduler.submit(known, 0.0, [RestoredSequence([], True)]) is None
    assert not bench.scheduler.is_live("known")
    lost = Request("lost", prompt(5), 1, 1, result=EMBEDDING)
    assert bench.scheduler.submit(lost, 0.0, [RestoredSequence([], False)]) is None
    assert values(bench.run()) == [("lost", VALUE)]


def test_stop_string_does_not_end_it() -> None:
    bench = CoreBench()
    bench.submit_for_value("a", prompt(5))
    bench.scheduler.finish("a", 0, 0)
    assert values(bench.run()) == [("a", VALUE)]


def test_prompt_as_long_as_the_context_is_accepted() -> None:
    bench = CoreBench(num_blocks=4)
    bench.submit_for_value("a", prompt(4 * BLOCK))
    assert values(bench.run()) == [("a", VALUE)]
    refused = bench.scheduler.check(Request("b", prompt(4 * BLOCK + 1), 1, 1, result=EMBEDDING), 0.0)
    assert refused is not None
    assert refused.reason is Failure.CONTEXT_LENGTH_EXCEEDED


def test_request_fails_if_its_value_is_missing() -> None:
    bench = CoreBench()
    bench.submit_for_value("a", prompt(5))
    bench.plan()
    [event] = bench.scheduler.commit(bench.replica, StepOutcome([Drawn([])]), 0.0)
    assert isinstance(event, FailedEvent)
    assert event.reason is Failure.INTERNAL


def test_suspected_request_runs_isolated_and_its_value_clears_it() -> None:
    bench = CoreBench()
    bench.submit_for_value("a", prompt(6))
    bench.submit("b", prompt(6, 500), 8)
    for _ in range(2):
        bench.plan()
        assert bench.lose(bench.replica) == []
        bench.replica = bench.join()
    assert keys(bench.step()) == ["a"]
    assert not bench.scheduler.is_live("a")


def test_workers_that_do_not_compute_it_are_passed_over() -> None:
    bench = CoreBench(results={TOKENS.name: PromptComputation.CHUNKED})
    able = bench.join()
    sequence = bench.submit_for_value("a", prompt(6))
    assert bench.plan() is None
    bench.plan(able)
    assert able.holds(sequence)


def test_bounds_of_the_queue_count_prompts_too() -> None:
    """The prompt of a request for a value counts against the limit of tokens; the value counts as no token."""
    bench = CoreBench(limits=SchedulerLimits())
    bench.submit_for_value("a", prompt(6))
    assert bench.scheduler.waiting.admission.num_tokens == 6
