"""Of a tenant's requests the one whose first token is due first is admitted first: a short prompt does not wait for a
long one that came shortly before.
"""

from typing import Any

import pytest

from core_bench import BLOCK, EMBEDDING, SHAPE, CoreBench, keys, prompt, tokens_of
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.order import PolicySettings
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR, Phase, Request, RestoredSequence, Sequence
from scheduler_svc.core.results import PromptComputation
from scheduler_svc.core.scheduler import Scheduler

LONG = prompt(100 * BLOCK, 5000)  # 0.4 s at the bench's 1,000 tokens a second
SHORT = prompt(2 * BLOCK, 9000)


def busy(**given: Any) -> CoreBench:
    """A bench whose step in flight computes a prompt; it is committed by `commit`."""
    bench = CoreBench(**{"policy": "fair"} | given)
    bench.submit("before", prompt(bench.replica.shape.max_step_tokens), 1)
    bench.plan()
    return bench


def next_keys(bench: CoreBench) -> list[str]:
    """The requests whose prompts the next step computes."""
    bench.commit()
    plan = bench.plan()
    assert plan is not None
    return keys(plan)


IN_ORDER = SchedulerLimits(policy_settings=PolicySettings(short_prompts_first=False))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (SchedulerLimits(), ["short", "long"]),
        (SchedulerLimits(policy="priority"), ["long"]),
        (SchedulerLimits(policy="fcfs"), ["long"]),
        (IN_ORDER, ["long"]),
    ],
)
def test_a_short_prompt_goes_before_a_long_one_under_fair_only(limits: SchedulerLimits, expected: list[str]) -> None:
    bench = busy(limits=limits)
    bench.submit("long", LONG)
    bench.now += 0.2
    bench.submit("short", SHORT)
    assert sorted(next_keys(bench), reverse=True) == expected


def test_no_short_prompt_goes_before_a_long_one_that_came_long_before() -> None:
    bench = busy(max_sequences=2)
    [long] = bench.submit("long", LONG)
    shorts: list[Sequence] = []
    while long.phase is Phase.QUEUED:
        bench.now += 0.06
        shorts += bench.submit(f"short {bench.now}", prompt(20 * BLOCK, 20_000 + 100 * len(shorts)), 4)
        bench.commit()
        bench.plan()
    least = FIRST_TOKEN_FACTOR * (long.prompt_seconds - shorts[0].prompt_seconds)
    assert least > 1.0
    assert {sequence.request.arrived_at < least for sequence in shorts if sequence.phase is Phase.ENDED} == {True}
    assert {sequence.request.arrived_at < least for sequence in shorts if sequence.phase is Phase.QUEUED} == {False}


def test_a_long_prompt_whose_prefix_is_cached_is_a_short_one() -> None:
    bench = CoreBench(policy="fair")
    bench.submit("cached", LONG, 1)
    bench.run()
    bench.submit("before", prompt(64), 1)
    bench.plan()
    bench.submit("another", prompt(50 * BLOCK, 9000))
    bench.now += 0.1
    [again] = bench.submit("again", [*LONG, 1])
    assert again.prompt_seconds < 0.01
    assert next_keys(bench)[0] == "again"


def test_the_worker_with_most_of_a_prompt_says_how_long_it_takes_unless_it_is_given_nothing_more() -> None:
    bench = CoreBench(policy="fair")
    other = bench.join()
    bench.submit("cached", LONG, 1)
    while "cached" in bench.scheduler.keys:
        bench.step(at=other)
    [again] = bench.submit("again", LONG)
    assert again.prompt_seconds == pytest.approx(0.001), "the last token is computed again"
    [new] = bench.submit("new", prompt(100, 20_000))
    assert new.prompt_seconds == pytest.approx(0.1)
    other.is_retired = True
    [once_more] = bench.submit("once more", LONG)
    assert once_more.prompt_seconds == pytest.approx(0.4)


def test_what_waited_for_a_prefix_has_only_the_rest_of_its_prompt_to_compute() -> None:
    bench = CoreBench(policy="fair", max_step_tokens=128)
    bench.submit("question 1", [*LONG, 1])
    bench.step()
    [second] = bench.submit("question 2", [*LONG, 2])
    [_, choice] = bench.submit("choices", prompt(40, 20_000), n=2)
    while choice.phase is not Phase.RUNNING or second.phase is not Phase.RUNNING:
        bench.step()
    assert second.prompt_seconds == pytest.approx(0.001)
    assert choice.prompt_seconds == 0.0, "its prompt was computed for the other choice"


def test_an_embedding_is_due_by_the_length_of_its_text() -> None:
    bench = busy()
    bench.submit_for_value("long", LONG)
    bench.now += 0.2
    bench.submit_for_value("short", SHORT)
    assert next_keys(bench)[0] == "short"


def test_without_a_worker_a_token_takes_as_long_as_the_ones_before() -> None:
    bench = CoreBench(policy="fair")
    [long] = bench.submit("long", LONG)
    bench.lose(bench.replica)
    [longer] = bench.submit("longer", prompt(150 * BLOCK, 20_000))
    assert longer.prompt_seconds == pytest.approx(1.5 * long.prompt_seconds)


def test_without_any_worker_yet_requests_keep_the_order_of_their_arrival() -> None:
    scheduler = Scheduler(SchedulerLimits(policy="fair"))
    for number, tokens in enumerate((LONG, SHORT)):
        assert scheduler.submit(Request(f"{number}", tokens, 1, 4, arrived_at=0.0), 0.0) is None
    waiting = scheduler.waiting
    assert [waiting.num_ahead(scheduler.sequences(f"{number}")[0], 0, 0.0) for number in range(2)] == [0, 1]


def test_a_request_that_an_earlier_scheduler_began_is_due_before_new_ones() -> None:
    bench = busy()
    begun = Request("begun", LONG, 1, 8, arrived_at=bench.now)
    assert bench.scheduler.submit(begun, bench.now, [RestoredSequence([7, 7], False)]) is None
    bench.now += 0.1
    bench.submit("short", SHORT)
    assert next_keys(bench) == ["begun"]


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_preempted_stream_does_not_wait_for_prompts_that_came_later(mode: PreemptionMode) -> None:
    bench = CoreBench(policy="fair", preemption=mode, num_blocks=110, max_step_tokens=512)
    [long] = bench.submit("long", LONG, 30)
    bench.steps(2)
    assert long.num_output > 0
    bench.scheduler._preemptor.preempt(bench.replica, long)
    while long.phase is Phase.PREEMPTED:
        bench.step()
    bench.now += 0.1
    bench.submit("short", SHORT, 1)
    assert "long" in tokens_of(bench.step())
    bench.run()


# Prompts that run.


def with_running_prompt(**given: Any) -> CoreBench:
    """A bench that has computed a part of a long prompt."""
    bench = CoreBench(**{"policy": "fair"} | given)
    bench.submit("long", LONG)
    assert tokens_of(bench.step()) == {"long": 64}
    return bench


def test_short_prompts_are_computed_before_a_long_one_that_runs() -> None:
    bench = with_running_prompt()
    for number in range(4):
        bench.submit(f"{number}", prompt(2 * BLOCK, 20_000 + 100 * number), 1)
    assert tokens_of(bench.step()) == {"0": 8, "1": 8, "2": 8, "3": 8, "long": 32}
    bench.submit("as long as a step", prompt(64, 30_000))
    assert tokens_of(bench.step()) == {"as long as a step": 64}
    assert tokens_of(bench.step()) == {"as long as a step": 1, "long": 63}


def test_a_prompt_that_runs_goes_on_before_what_is_due_later() -> None:
    bench = with_running_prompt()
    bench.now += FIRST_TOKEN_FACTOR * 0.4
    bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_deadline_does_not_stop_a_prompt_that_runs() -> None:
    bench = with_running_prompt()
    bench.submit("hasty", prompt(99 * BLOCK, 20_000), deadline=bench.now + 2.0)
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_prompt_that_runs_and_has_a_deadline_waits_for_no_shorter_one() -> None:
    bench = CoreBench(policy="fair")
    bench.submit("long", LONG, deadline=bench.now + 30.0)
    bench.step()
    bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_prompt_that_runs_goes_on_before_one_that_is_cached_elsewhere_only() -> None:
    bench = CoreBench(policy="fair", max_sequences=8)
    other = bench.join(max_sequences=1)
    bench.submit("cached", prompt(120 * BLOCK, 20_000), 1)
    while "cached" in bench.scheduler.keys:
        bench.step(at=other)
    bench.submit("decodes there", SHORT, 500)
    bench.step(at=other)
    bench.submit("long", LONG)
    bench.step()
    [longer] = bench.submit("longer", [*prompt(120 * BLOCK, 20_000), 1])
    assert longer.prompt_seconds == pytest.approx(0.001)
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_short_prompt_does_not_wait_for_a_long_one_while_another_short_one_is_partly_computed() -> None:
    bench = with_running_prompt()
    bench.submit("a", prompt(80, 20_000), 1)
    bench.submit("b", prompt(80, 30_000), 1)
    assert [tokens_of(bench.step()) for _ in range(3)] == [{"a": 64}, {"a": 16, "b": 48}, {"b": 32, "long": 32}]


def test_a_long_prompt_of_which_little_fits_into_a_step_is_in_it_once() -> None:
    bench = CoreBench(policy="fair", max_step_tokens=512, num_blocks=4000)
    for number in range(3):
        bench.submit(f"decode {number}", prompt(8, 1000 * number), 500)
    bench.step(busy_seconds=0.02)
    for _ in range(150):
        bench.step(busy_seconds=0.004)
    bench.submit("longest", prompt(4000, 20_000))
    bench.step(busy_seconds=0.004)
    bench.submit("long", prompt(1100, 40_000))
    assert set(tokens_of(bench.step(busy_seconds=0.004))) >= {"decode 0", "decode 1", "decode 2", "long"}


def test_a_prompt_that_runs_goes_on_before_one_that_takes_longer_than_its_rest() -> None:
    bench = with_running_prompt()
    bench.steps(4)
    bench.submit("shorter than the whole", prompt(30 * BLOCK, 20_000))
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_prompt_that_runs_goes_on_while_a_shorter_one_has_no_room() -> None:
    bench = with_running_prompt(max_sequences=1)
    bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}
    bench = with_running_prompt(num_blocks=102)
    bench.submit("short", prompt(3 * BLOCK, 9000))
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_prompt_that_runs_goes_on_while_a_shorter_one_is_admitted_by_another_worker() -> None:
    bench = with_running_prompt()
    other = bench.join()
    [short] = bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}
    assert short in other.running


def test_a_prompt_that_runs_goes_on_while_a_shorter_one_waits_for_its_blocks() -> None:
    bench = with_running_prompt()
    bench.submit("same", LONG[: 50 * BLOCK])
    assert tokens_of(bench.step()) == {"long": 64}
    bench.run()


def test_a_prompt_that_runs_is_given_what_the_cached_part_of_another_one_does_not_take() -> None:
    bench = CoreBench(policy="fair")
    cached = prompt(80 * BLOCK, 20_000)
    bench.submit("cached", cached, 1)
    bench.run()
    bench.submit("long", LONG)
    bench.step()
    bench.submit("again", [*cached, 1, 2, 3])
    assert tokens_of(bench.step()) == {"long": 61, "again": 3}


def test_a_prompt_that_runs_goes_on_before_indivisible_ones() -> None:
    results = {**SHAPE.results, EMBEDDING.name: PromptComputation.INDIVISIBLE}
    bench = with_running_prompt(results=results)
    bench.submit_for_value("text", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}


def test_a_prompt_that_runs_shares_a_step_with_another_tenant_however_long_that_one_is() -> None:
    bench = with_running_prompt()
    bench.submit("longer", prompt(150 * BLOCK, 30_000), tenant="another")
    assert tokens_of(bench.step()) == {"long": 32, "longer": 32}
    bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"short": 8, "long": 56}, "it is the turn of this tenant"
    assert tokens_of(bench.step()) == {"short": 1, "longer": 63}, "and then of the other one"


def test_of_prompts_that_run_the_one_that_is_due_first_goes_on() -> None:
    bench = with_running_prompt()
    bench.submit("shorter", prompt(60 * BLOCK, 20_000))
    assert tokens_of(bench.step()) == {"shorter": 64}
    assert tokens_of(bench.step()) == {"shorter": 64}


@pytest.mark.parametrize("limits", [SchedulerLimits(policy="fcfs"), SchedulerLimits(policy="priority"), IN_ORDER])
def test_in_other_orders_a_prompt_that_runs_goes_on_before_a_shorter_one(limits: SchedulerLimits) -> None:
    bench = with_running_prompt(limits=limits)
    bench.submit("short", SHORT)
    assert tokens_of(bench.step()) == {"long": 64}
