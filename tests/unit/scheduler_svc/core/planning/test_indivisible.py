"""Prompts that must be computed in one step: together with others if they fit, else first in the next step."""

from typing import Any

import pytest

from core_bench import BLOCK, EMBEDDING, CoreBench, keys, prompt, tokens_of
from scheduler_svc.core.events import Failure
from scheduler_svc.core.explain import SequenceStatus, explain
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning import indivisible
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.request import Phase, Request, Sequence
from scheduler_svc.core.results import TOKENS, PromptComputation
from scheduler_svc.core.step import StepPlan

BUDGET = 16  # tokens of a step, by the scheduler's limit
MOST = 64  # that a worker's step holds
HOWS = [PromptComputation.INDIVISIBLE, PromptComputation.INDIVISIBLE_WITHOUT_KV]
both = pytest.mark.parametrize("how", HOWS)


def bench_of(how: PromptComputation, **shape: Any) -> CoreBench:
    results = {TOKENS.name: PromptComputation.CHUNKED, EMBEDDING.name: how}
    limits = SchedulerLimits(policy="fcfs", max_step_tokens=BUDGET)
    return CoreBench(limits=limits, results=results, **({"max_step_tokens": MOST} | shape))


def planned(bench: CoreBench) -> StepPlan:
    plan = bench.plan()
    assert plan is not None
    return plan


@both
def test_prompt_within_the_budget_is_computed_beside_decodes(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit("decodes", prompt(4), 50)
    bench.step()
    bench.submit_for_value("a", prompt(10, 500))
    assert tokens_of(bench.step()) == {"decodes": 1, "a": 10}
    assert not bench.scheduler.is_live("a")


@both
def test_prompt_above_the_budget_is_computed_alone(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(MOST))
    assert tokens_of(bench.step()) == {"a": MOST}
    assert not bench.scheduler.is_live("a")
    assert bench.num_used == 0


@both
def test_others_wait_one_step_for_a_prompt_above_the_budget(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit("decodes", prompt(4), 50)
    bench.step()
    for key in "abc":
        bench.submit_for_value(key, prompt(40, 1000 * ord(key)))
    steps = [tokens_of(plan) for plan in bench.steps(7)]
    assert steps == [{"decodes": 1}, {"a": 40}, {"decodes": 1}, {"b": 40}, {"decodes": 1}, {"c": 40}, {"decodes": 1}]


@both
def test_step_after_a_due_prompt_does_not_begin_with_another(how: PromptComputation) -> None:
    bench = bench_of(how)
    replica = bench.replica
    for number in range(2):
        tokens = prompt(40, 1000 * number)
        request = Request(str(number), tokens, 1, 1, result=EMBEDDING)
        replica.admit(Sequence(100 + number, request, 0, number, tokens), Hit([]))
    replica.is_indivisible_due = True
    step = StepBuilder(replica, bench.scheduler.limits)
    indivisible.begin_with_due(step)
    indivisible.add_fitting(step)
    assert [part.sequence.request.key for part in step.scheduled] == ["0"]
    assert step.is_closed
    assert not replica.is_indivisible_due


@both
def test_prompt_that_fits_only_alone_begins_the_next_step(how: PromptComputation) -> None:
    """Other sequences get the rest of the budget."""
    bench = bench_of(how)
    for number in range(6):
        bench.submit(f"{number}", prompt(1, 1000 * number), 50)
    bench.step()
    bench.submit_for_value("a", prompt(BUDGET - 2, 9000))
    first, second = bench.steps(2)
    assert len(first.scheduled) == 6
    assert tokens_of(second)["a"] == BUDGET - 2
    assert len(second.scheduled) == 3
    assert second.num_tokens == BUDGET


@both
def test_short_prompts_share_a_step(how: PromptComputation) -> None:
    bench = bench_of(how)
    for key in "abcd":
        bench.submit_for_value(key, prompt(5, 1000 * ord(key)))
    assert [tokens_of(plan) for plan in bench.steps(2)] == [{"a": 5, "b": 5, "c": 5}, {"d": 5}]


@both
def test_prompt_does_not_wait_for_chunked_prompts(how: PromptComputation) -> None:
    bench = bench_of(how)
    other = bench.join(max_step_tokens=MOST, results={})
    bench.submit("long", prompt(200), 1)
    bench.submit("decodes", prompt(4, 5000), 50)
    bench.lose(other)
    sequence = bench.submit_for_value("a", prompt(12, 9000))
    bench.steps(16)
    assert sequence.phase is Phase.ENDED


@both
def test_cached_prefix_is_not_used(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit("before", prompt(2 * BLOCK), 1)
    bench.step()
    sequence = bench.submit_for_value("a", prompt(2 * BLOCK + 1))
    assert tokens_of(bench.step()) == {"a": 2 * BLOCK + 1}
    assert sequence.num_cached_prompt_tokens == 0


@pytest.mark.parametrize(("how", "num_cached"), [(HOWS[0], 2 * BLOCK), (HOWS[1], 0)])
def test_blocks_of_the_prompt_are_cached(how: PromptComputation, num_cached: int) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(2 * BLOCK))
    bench.step()
    [after] = bench.submit("after", prompt(2 * BLOCK + 1), 1)
    bench.step()
    assert after.num_cached_prompt_tokens == num_cached


def test_prompt_without_kv_takes_no_block() -> None:
    bench = bench_of(PromptComputation.INDIVISIBLE_WITHOUT_KV)
    sequence = bench.submit_for_value("a", prompt(40))
    plan = planned(bench)
    assert (bench.num_used, sequence.block_ids, plan.scheduled[0].new_block_ids) == (0, [], [])
    bench.commit()
    assert not bench.scheduler.is_live("a")


def test_prompt_without_kv_may_be_longer_than_the_blocks_hold() -> None:
    bench = CoreBench(num_blocks=1, results={EMBEDDING.name: PromptComputation.INDIVISIBLE_WITHOUT_KV})
    bench.submit_for_value("a", prompt(60))
    assert tokens_of(bench.step()) == {"a": 60}


def test_prompt_without_kv_needs_no_block_for_admission() -> None:
    bench = bench_of(PromptComputation.INDIVISIBLE_WITHOUT_KV, num_blocks=6)
    bench.submit("holds", prompt(16), 8)
    bench.steps(4)
    bench.submit_for_value("a", prompt(15, 900))
    assert "a" in keys(bench.step())


@both
def test_it_counts_as_one_of_the_sequences_of_a_step(how: PromptComputation) -> None:
    bench = bench_of(how, max_sequences=2)
    for key in "abc":
        bench.submit_for_value(key, prompt(2, 1000 * ord(key)))
    assert keys(planned(bench)) == ["a", "b"]
    assert bench.plan() is None
    assert bench.scheduler.num_running == 2
    bench.commit()
    assert keys(planned(bench)) == ["c"]


@both
def test_it_is_explained_as_running(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(10))
    planned(bench)
    explanation = explain(bench.scheduler, "a", bench.now)
    assert explanation is not None
    [one] = explanation.sequences
    assert (one.status, one.num_missing_blocks) == (SequenceStatus.RUNNING, 0)
    assert one.num_device_blocks == (3 if how is PromptComputation.INDIVISIBLE else 0)


@both
def test_it_can_be_cancelled_while_its_step_is_in_flight(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(10))
    planned(bench)
    bench.scheduler.cancel("a")
    assert bench.commit() == []
    assert bench.num_used == 0
    assert bench.plan() is not None  # the worker forgets it
    bench.commit()


@both
def test_it_is_computed_again_after_its_worker_is_lost(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(40))
    planned(bench)
    results = bench.replica.shape.results
    assert bench.lose(bench.replica) == []
    bench.replica = bench.join(results=results, max_step_tokens=MOST)
    assert tokens_of(bench.step()) == {"a": 40}
    assert not bench.scheduler.is_live("a")


@both
def test_it_leaves_a_replica_that_is_retired(how: PromptComputation) -> None:
    """Steps in flight still count."""
    bench = bench_of(how, max_sequences=2)
    for key in "abc":
        bench.submit_for_value(key, prompt(20, 1000 * ord(key)))
    planned(bench)
    other = bench.join(results=bench.replica.shape.results, max_step_tokens=MOST)
    assert bench.scheduler.retire(bench.replica) == []
    assert len(bench.commit()) == 1
    assert bench.replica.is_idle
    while bench.plan(other) is not None:
        bench.commit(at=other)
    assert not list(bench.scheduler.keys)


@both
def test_suspected_prompt_runs_isolated_above_the_budget(how: PromptComputation) -> None:
    bench = bench_of(how)
    bench.submit_for_value("a", prompt(40))
    shape = {"results": bench.replica.shape.results, "max_step_tokens": MOST}
    for _ in range(2):
        assert keys(planned(bench)) == ["a"]
        bench.lose(bench.replica)
        bench.replica = bench.join(**shape)
    bench.submit("other", prompt(2, 900), 30)
    assert {"a": 40} in [tokens_of(plan) for plan in bench.steps(2)]
    assert not bench.scheduler.is_live("a")


@both
def test_prompt_longer_than_any_step_is_rejected(how: PromptComputation) -> None:
    bench = bench_of(how)
    refused = bench.scheduler.check(Request("a", prompt(MOST + 1), 1, 1, result=EMBEDDING), 0.0)
    assert refused is not None
    assert refused.reason is Failure.CONTEXT_LENGTH_EXCEEDED
    assert refused.message == (
        "this model computes the embedding of a prompt in one step, of at most 64 tokens, and the prompt has 65"
    )


@both
def test_a_worker_may_compute_longer_prompts_than_its_steps_have_tokens(how: PromptComputation) -> None:
    bench = bench_of(how, max_step_tokens=BUDGET, max_indivisible_tokens=MOST)
    for key, length in (("a", 10), ("b", MOST), ("c", 10)):
        bench.submit_for_value(key, prompt(length, 500))
    assert [tokens_of(bench.step()) for _ in range(3)] == [{"a": 10}, {"b": MOST}, {"c": 10}]
    refused = bench.scheduler.check(Request("d", prompt(MOST + 1), 1, 1, result=EMBEDDING), 0.0)
    assert refused is not None
    assert "of at most 64 tokens" in refused.message


@both
def test_prompt_goes_to_the_replica_whose_step_holds_it(how: PromptComputation) -> None:
    bench = bench_of(how, max_step_tokens=20)
    large = bench.join(results=bench.replica.shape.results, max_step_tokens=MOST)
    sequence = bench.submit_for_value("a", prompt(30))
    assert bench.plan() is None
    assert bench.plan(large) is not None
    assert large.holds(sequence)
