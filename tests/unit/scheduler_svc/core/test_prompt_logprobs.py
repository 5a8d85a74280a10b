"""Log-probabilities of prompts: one for each token behind the first, once, whatever is recomputed.

The bench gives each token its place for a log-probability.
"""

from typing import Any

import pytest

from core_bench import BLOCK, TOKEN, CoreBench, crowded, prompt
from scheduler_svc.core.events import Event, PromptLogprobsEvent, TokensEvent
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import Request, RestoredSequence, Sequence
from scheduler_svc.core.results import PROMPT_LOGPROBS


def submit(bench: CoreBench, key: str, tokens: list[int], max_tokens: int = 2, **fields: Any) -> list[Sequence]:
    return bench.submit(key, tokens, max_tokens, result=PROMPT_LOGPROBS, **fields)


def positions(events: list[Event], key: str = "a") -> list[int]:
    """Places of the tokens whose log-probabilities came; each event says rightly where it begins."""
    found: list[int] = []
    for event in events:
        if isinstance(event, PromptLogprobsEvent) and event.request.key == key:
            assert event.offset == event.logprobs[0]
            found += event.logprobs  # type: ignore[arg-type]
    return found


def test_they_are_returned_by_chunk_before_the_first_token() -> None:
    bench = CoreBench(max_step_tokens=4)
    submit(bench, "a", prompt(10), max_tokens=1)
    events = bench.run()
    assert [len(event.logprobs) for event in events if isinstance(event, PromptLogprobsEvent)] == [4, 4, 1]
    assert positions(events) == list(range(1, 10))
    assert isinstance(events[-1], TokensEvent)
    assert list(events[-1].token_ids) == [TOKEN]


def test_prompt_of_one_token_has_none() -> None:
    bench = CoreBench()
    submit(bench, "a", prompt(1))
    assert positions(bench.run()) == []


def test_nothing_comes_from_the_cache_but_all_blocks_are_cached() -> None:
    bench = CoreBench()
    bench.submit("before", prompt(4 * BLOCK), max_tokens=1)
    bench.step()
    [sequence] = submit(bench, "a", prompt(4 * BLOCK))
    assert positions(bench.run()) == list(range(1, 4 * BLOCK))
    assert sequence.num_cached_prompt_tokens == 0
    [after] = bench.submit("after", prompt(4 * BLOCK + 1), max_tokens=1)
    bench.step()
    assert after.num_cached_prompt_tokens == 4 * BLOCK


def test_they_do_not_wait_for_another_request_with_the_same_prompt() -> None:
    bench = CoreBench()
    bench.submit("before", prompt(4 * BLOCK))
    submit(bench, "a", prompt(4 * BLOCK))
    plan = bench.plan()
    assert plan is not None
    assert plan.num_tokens == 8 * BLOCK


def test_another_request_waits_for_what_they_compute() -> None:
    bench = CoreBench()
    submit(bench, "a", prompt(4 * BLOCK + 1))
    [other] = bench.submit("b", prompt(4 * BLOCK + 1))
    bench.run()
    assert other.num_cached_prompt_tokens == 4 * BLOCK


def test_several_sequences_return_them_once() -> None:
    bench = CoreBench()
    sequences = submit(bench, "a", prompt(2 * BLOCK + 1), n=3)
    assert positions(bench.run()) == list(range(1, 2 * BLOCK + 1))
    assert [sequence.num_cached_prompt_tokens for sequence in sequences] == [0, 2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_prompt_returns_none_twice(mode: PreemptionMode) -> None:
    bench = crowded(mode)
    [sequence] = submit(bench, "a", prompt(40, 9000))
    events = bench.run()
    assert sequence.last_preemption is not None
    assert sequence.last_preemption.method.name == mode.name
    assert positions(events) == list(range(1, 40))


def test_none_is_returned_twice_after_a_lost_worker() -> None:
    bench = CoreBench(max_step_tokens=6)
    submit(bench, "a", prompt(20))
    bench.plan()
    events = bench.commit()
    assert bench.lose(bench.replica) == []
    bench.replica = bench.join(max_step_tokens=6)
    assert positions([*events, *bench.run()]) == list(range(1, 20))


def test_tokens_that_were_returned_may_come_from_the_cache() -> None:
    """On another replica, whose cache has the prompt: only what is still to be given is computed there."""
    bench = CoreBench(max_step_tokens=10)
    submit(bench, "a", prompt(6 * BLOCK))
    bench.plan()
    events = bench.commit()
    other = bench.join()
    bench.lose(bench.replica)
    bench.replica = other
    bench.submit("b", prompt(6 * BLOCK), max_tokens=1)
    bench.scheduler.cancel("a")
    bench.step()
    given = len(positions(events))
    request = Request("a", prompt(6 * BLOCK), 1, 1, result=PROMPT_LOGPROBS)
    assert bench.scheduler.submit(request, 0.0, [RestoredSequence([], False, given)]) is None
    plan = bench.plan()
    assert plan is not None
    assert (given, plan.scheduled[0].start) == (10, 2 * BLOCK)
    assert positions(bench.commit()) == list(range(11, 6 * BLOCK))


def test_returned_ones_are_not_requested_again() -> None:
    bench = CoreBench()
    request = Request("a", prompt(9), 1, 3, result=PROMPT_LOGPROBS)
    assert bench.scheduler.submit(request, 0.0, [RestoredSequence([TOKEN], False, 8)]) is None
    plan = bench.plan()
    assert plan is not None
    assert not plan.new_sequences[0].needs_prompt_logprobs
    assert positions(bench.commit()) == []


def test_block_of_a_sibling_is_not_copied_before_they_are_returned() -> None:
    """The prompt is shorter than a block: the sibling that samples already has all of it."""
    bench = CoreBench()
    request = Request("a", prompt(BLOCK - 1), 2, 9, result=PROMPT_LOGPROBS)
    assert bench.scheduler.submit(request, 0.0, [RestoredSequence([], False), RestoredSequence([TOKEN], False)]) is None
    first, second = bench.scheduler.sequences("a")
    bench.scheduler.waiting.release_all(first)
    bench.scheduler.waiting.remove(first)
    bench.step()
    assert second.num_committed == BLOCK
    bench.scheduler.waiting.policy.add(first, 0.0)
    assert positions(bench.run()) == list(range(1, BLOCK - 1))


def test_worker_that_speculates_returns_them_too() -> None:
    bench = CoreBench(max_sampled_tokens=3, max_step_tokens=4)
    submit(bench, "a", prompt(9), max_tokens=1)
    assert positions(bench.run()) == list(range(1, 9))
