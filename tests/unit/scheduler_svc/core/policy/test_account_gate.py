"""Limits of accounts on what runs: slots and blocks."""

from typing import Any

import pytest

from core_bench import BLOCK, EMBEDDING, CoreBench, prompt
from large import large_but
from random_worlds import LimitedWorld, run_world
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.events import Failure
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request

POLICIES = ["fair", "priority", "fcfs"]


def limited(name: str = "a/", **limits: Any) -> dict[str, Any]:
    """Fields of a request of an account with limits."""
    return {"tenant": name.split("/")[0], "limits": AccountLimits(name, **limits)}


def refusal(bench: CoreBench, request: Request) -> tuple[Failure, str]:
    event = bench.scheduler.submit(request, bench.now)
    assert event is not None
    return event.reason, event.message


def running(bench: CoreBench) -> set[str]:
    return {sequence.request.key for replica in bench.scheduler.replicas for sequence in replica.running}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_account_at_its_limit_waits_and_others_do_not(policy: str) -> None:
    bench = CoreBench(policy=policy)
    for number in range(5):
        bench.submit(f"a{number}", prompt(8, 100 * number), 8, **limited(max_running=2))
    bench.submit("b", prompt(8, 1000), 8, tenant="b", limits=AccountLimits("b/"))
    bench.submit("other key of a", prompt(8, 2000), 8, **limited("a/other", max_running=1))
    bench.step()
    assert running(bench) == {"a0", "a1", "b", "other key of a"}
    assert bench.scheduler.num_queued == 3
    bench.scheduler.cancel("a0")
    bench.step()
    assert running(bench) == {"a1", "a2", "b", "other key of a"}
    bench.run()
    assert bench.scheduler.num_queued == bench.scheduler.num_running == 0


def test_a_limit_holds_for_all_replicas_together() -> None:
    bench = CoreBench(policy="fair", max_sequences=2)
    other = bench.join(max_sequences=2)
    for number in range(4):
        bench.submit(f"a{number}", prompt(8, 100 * number), 8, **limited(max_running=3))
    bench.step()
    bench.step(at=other)
    assert [replica.num_running for replica in (bench.replica, other)] in ([2, 1], [1, 2])
    bench.scheduler.cancel("a0")
    bench.plan()
    assert other in bench.scheduler.take_placed(), "a replica with a free slot may admit what was held back"


@pytest.mark.parametrize("policy", POLICIES)
def test_of_an_account_a_higher_priority_goes_first(policy: str) -> None:
    bench = CoreBench(policy=policy)
    bench.submit("first", prompt(8), 8, **limited(max_running=1))
    bench.step()
    for priority in (0, -1, 3, 1):
        bench.submit(f"priority {priority}", prompt(8, 50 * priority), 8, priority=priority, **limited(max_running=1))
    order = []
    for _ in range(5):
        (key,) = running(bench)
        order.append(key)
        bench.scheduler.cancel(key)
        bench.step()
    assert order == ["first", "priority 3", "priority 1", "priority 0", "priority -1"]


def test_a_higher_priority_takes_the_place_of_another_one_in_the_queue() -> None:
    """All slots are another tenant's: what the account has in the queue is its most urgent request."""
    bench = CoreBench(policy="priority", max_sequences=1)
    bench.submit("another tenant's", prompt(8), 8, priority=9, tenant="b")
    bench.step()
    bench.submit("low", prompt(8, 100), 8, priority=-5, **limited(max_running=1))
    bench.submit("high", prompt(8, 200), 8, priority=5, **limited(max_running=1))
    bench.scheduler.cancel("another tenant's")
    bench.step()
    assert running(bench) == {"high"}


def test_sequences_of_one_request_run_one_after_the_other() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(8), 5, n=4, **limited(max_running=2))
    for _ in range(12):
        bench.step()
        assert len(bench.replica.running) <= 2
    assert not bench.scheduler.is_live("a")


def test_time_for_which_a_sequence_is_held_back_does_not_count_as_waiting() -> None:
    bench = CoreBench(policy="fair")
    bench.submit("first", prompt(8), 8, **limited(max_running=1))
    bench.step()
    (held,) = bench.submit("second", prompt(8, 100), 8, **limited(max_running=1))
    bench.now += 100.0
    bench.scheduler.cancel("first")
    bench.step()
    assert held.phase is Phase.RUNNING
    assert held.waited == 0


def test_an_operator_sees_how_many_are_ahead_of_one_that_is_held_back() -> None:
    bench = CoreBench(policy="fair")
    bench.submit("a0", prompt(8), 8, **limited(max_running=1))
    bench.step()
    held = [bench.submit(f"a{number}", prompt(8), 8, **limited(max_running=1))[0] for number in (1, 2, 3)]
    assert [bench.scheduler.waiting.num_ahead(each, 0, bench.now) for each in held] == [0, 1, 2]


# Blocks.


def blocks_of(bench: CoreBench, account: str = "a/") -> int:
    return sum(len(s.block_ids) for s in bench.replica.running if s.request.limits.account == account)


def test_prompts_wait_for_blocks_of_their_account() -> None:
    bench = CoreBench(policy="fair")
    for number in range(4):
        bench.submit(f"a{number}", prompt(3 * BLOCK - 1, 100 * number), 1, **limited(max_kv_blocks=7))
    bench.submit("b", prompt(3 * BLOCK, 1000), 5, tenant="b")
    bench.step()
    assert running(bench) == {"b"}  # two of the account had their token
    assert blocks_of(bench) == 0
    bench.run()
    assert bench.scheduler.num_queued == 0


def test_a_growing_account_preempts_its_last_sequence_and_no_other() -> None:
    bench = CoreBench(policy="fair")
    bench.submit("b", prompt(8, 1000), 40, tenant="b")
    for number in range(3):
        bench.submit(f"a{number}", prompt(BLOCK, 100 * number), 5 * BLOCK, **limited(max_kv_blocks=6))
    most, preempted = 0, []
    while bench.scheduler.keys:
        plan = bench.step()
        preempted += [sequence.request.key for sequence in plan.preempted]
        most = max(most, blocks_of(bench))
    assert most <= 6
    assert preempted[0] == "a2"
    assert "b" not in preempted
    assert "a0" not in preempted, "the first one is never preempted"
    assert bench.scheduler.totals.swaps == 0


def test_one_sequence_may_run_where_limits_have_become_too_small_for_it() -> None:
    bench = CoreBench()
    bench.submit("a0", prompt(4 * BLOCK), 4 * BLOCK, **limited(max_kv_blocks=8))
    bench.step()
    bench.submit("a1", prompt(BLOCK), 1, **limited(max_kv_blocks=2))
    bench.step()
    assert running(bench) == {"a0"}
    bench.run()
    assert bench.scheduler.num_queued == bench.scheduler.num_running == 0


def search(key: str, width: int, **fields: Any) -> Request:
    beam = BeamParams(width, 1.0, EarlyStopping.NEVER)
    return Request(key, prompt(2 * BLOCK), 1, 2 * BLOCK, beam=beam, **fields)


@pytest.mark.parametrize(
    ("request_", "failure", "message"),
    [
        (
            Request("a", prompt(4 * BLOCK - 1), 3, 2, **limited(max_kv_blocks=4)),
            Failure.TOO_MANY_TOKENS,
            "up to 5 KV blocks of 4 tokens, and max_kv_blocks of the API key is 4",
        ),
        (
            Request("a", prompt(4 * BLOCK), 3, 1, **limited(max_kv_blocks=4)),
            Failure.PROMPT_TOO_COSTLY,
            "the prompt and the first token of its output take 5 KV blocks of 4 tokens, and max_kv_blocks",
        ),
        (
            Request("a", prompt(4 * BLOCK + 1), 1, 1, result=EMBEDDING, **limited(max_kv_blocks=4)),
            Failure.PROMPT_TOO_COSTLY,
            "the prompt takes 5 KV blocks of 4 tokens, and max_kv_blocks of the API key is 4",
        ),
        (search("a", 3, **limited(max_kv_blocks=2)), Failure.PROMPT_TOO_COSTLY, "take 3 KV blocks of 4 tokens"),
        (search("a", 3, **limited(max_kv_blocks=7)), Failure.SEARCH_TOO_WIDE, "up to 8 KV blocks of 4 tokens"),
        (search("a", 3, **limited(max_running=2)), Failure.SEARCH_TOO_WIDE, "max_running of the API key, which is 2"),
    ],
    ids=["tokens", "prompt", "prompt of a value", "prompt of beams", "beams", "width"],
)
def test_what_can_never_run_is_refused(request_: Request, failure: Failure, message: str) -> None:
    reason, text = refusal(CoreBench(), request_)
    assert reason is failure
    assert message in text


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", prompt(4 * BLOCK - 1), 3, 1, **limited(max_kv_blocks=4, max_running=1)),
        search("a", 3, **limited(max_kv_blocks=8, max_running=3)),
    ],
    ids=["tokens", "beams"],
)
def test_what_just_fits_runs(request_: Request) -> None:
    bench = CoreBench()
    assert bench.scheduler.submit(request_, bench.now) is None


def test_a_search_uses_as_many_slots_as_it_is_wide() -> None:
    bench = CoreBench()
    assert bench.scheduler.submit(search("search", 3, **limited(max_running=3)), bench.now) is None
    bench.submit("a", prompt(8, 100), 8, **limited(max_running=3))
    bench.plan()
    assert running(bench) == {"search"}
    bench.scheduler.cancel("search")
    bench.plan()
    assert running(bench) == {"a"}


def test_a_search_is_not_preempted_where_limits_have_become_too_small_for_it() -> None:
    bench = CoreBench()
    assert bench.scheduler.submit(search("search", 3, **limited(max_kv_blocks=20)), bench.now) is None
    bench.steps(2)
    bench.submit("a", prompt(BLOCK, 100), 1, **limited(max_kv_blocks=2))
    while "search" in bench.scheduler.keys:
        plan = bench.step()
        assert not plan.preempted
        assert running(bench) <= {"search"}, "the other one waits"
    bench.run()
    assert bench.scheduler.num_queued == bench.scheduler.num_running == 0


# The order within an account.

FAST: dict[str, Any] = {
    "prefill_tokens_per_second": 1e6
}  # no prompt takes long enough to be due after one that comes later


def num_small_that_run_before(bench: CoreBench, key: str, **limits: Any) -> int:
    """Steps until a request runs. Before each a small one of the same account comes; how many of those ran."""
    num_small = 0
    for number in range(200):
        bench.now += 0.05
        bench.submit(f"small{number}", prompt(BLOCK, 1000 + 10 * number), 3, **limited(**limits))
        bench.plan()
        if key in running(bench):
            return num_small
        num_small += any(name.startswith("small") for name in running(bench))
        bench.commit()
    raise AssertionError(f"small requests ran in {num_small} steps, and {key} did not")


@pytest.mark.parametrize("policy", POLICIES)
def test_small_requests_do_not_overtake_a_large_one_of_their_account(policy: str) -> None:
    bench = CoreBench(policy=policy, **FAST)
    for number in range(3):
        bench.submit(f"before{number}", prompt(BLOCK, 200 * number), 3 + number, **limited(max_kv_blocks=20))
    bench.submit("large", prompt(18 * BLOCK, 5000), 8, **limited(max_kv_blocks=20))
    assert num_small_that_run_before(bench, "large", max_kv_blocks=20) == 0


def test_under_fair_small_requests_overtake_a_large_one_until_its_first_token_is_due() -> None:
    bench = CoreBench(policy="fair")
    for number in range(3):
        bench.submit(f"before{number}", prompt(BLOCK, 200 * number), 3 + number, **limited(max_kv_blocks=20))
    bench.submit("large", prompt(18 * BLOCK, 5000), 8, **limited(max_kv_blocks=20))  # 0.072 s, so it is due after 0.288
    # One comes every 0.05 s, and the last one that goes before it runs for three steps.
    assert 0 < num_small_that_run_before(bench, "large", max_kv_blocks=20) <= 0.288 / 0.05 + 3


@pytest.mark.parametrize("policy", POLICIES)
def test_small_requests_do_not_overtake_one_that_waits_on_its_worker_without_a_slot(policy: str) -> None:
    bench = CoreBench(policy=policy)
    [large] = bench.submit("large", prompt(16 * BLOCK, 5000), 8, **limited(max_kv_blocks=20))
    bench.submit("before", prompt(2 * BLOCK + 1, 8000), 5, **limited(max_kv_blocks=20))
    bench.steps(2)
    assert bench.scheduler._preemptor.take_slot(bench.replica, large)
    assert large.phase is Phase.SWAPPED
    assert num_small_that_run_before(bench, "large", max_kv_blocks=18) == 0
    bench.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_single_sequences_do_not_overtake_a_beam_search_of_their_account(policy: str) -> None:
    bench = CoreBench(policy=policy, **FAST)
    for number in range(3):
        bench.submit(f"before{number}", prompt(BLOCK, 200 * number), 3 + number, **limited(max_running=4))
    assert bench.scheduler.submit(search("search", 4, arrived_at=bench.now, **limited(max_running=4)), 0.0) is None
    assert num_small_that_run_before(bench, "search", max_running=4) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_later_ones_in_the_queue_do_not_keep_an_earlier_one_out_of_it(policy: str) -> None:
    """All slots become free at once: nothing else asks for another step."""
    bench = CoreBench(policy=policy, max_sequences=3)
    bench.submit("a0", prompt(8), 3, **limited(max_running=2))
    for number in range(2):
        bench.submit(f"b{number}", prompt(8, 500 + 100 * number), 3, priority=1, tenant="b")
    bench.step()
    fields = {"arrived_at": bench.now, **limited(max_running=2)}
    assert bench.scheduler.submit(search("search", 2, **fields), bench.now) is None
    for number in (1, 2):
        bench.submit(f"a{number}", prompt(8, 100 * number), 3, **limited(max_running=2))
    while bench.scheduler.num_running:
        bench.step()
    bench.plan()
    assert running(bench) == {"search"}
    bench.scheduler.cancel("search")
    bench.run()


# The latest limits.


def test_the_limits_of_the_latest_request_apply_to_its_account() -> None:
    bench = CoreBench()
    names = iter(range(10))

    def submit(arrived_at: float, **limits: Any) -> None:
        bench.now, number = arrived_at, next(names)
        bench.submit(str(number), prompt(8, 100 * number), 40, limits=AccountLimits("a/", **limits))

    for _ in range(3):
        submit(1.0)
    bench.step()
    assert len(running(bench)) == 3
    submit(2.0, max_running=2)
    submit(1.5)  # a new leader may learn of an earlier request later
    bench.step()
    assert len(running(bench)) == 3, "what runs goes on, and the rest waits"
    submit(3.0)
    bench.step()
    assert len(running(bench)) == 6


def test_an_account_without_requests_is_forgotten() -> None:
    bench = CoreBench()
    for number in range(3):
        bench.submit(f"a{number}", prompt(8, 100 * number), 4, **limited(max_running=1))
    bench.run()
    gate = bench.scheduler.waiting.accounts
    assert (len(gate), gate._accounts, gate._limited) == (0, {}, {})


def test_requests_without_an_account_share_no_limits() -> None:
    bench = CoreBench()
    for number in range(3):
        bench.submit(str(number), prompt(8, 100 * number), 4, limits=AccountLimits(max_running=1))
    bench.submit("no key", prompt(8, 900), 4)
    bench.step()
    assert len(running(bench)) == 4
    bench.run()


# Random worlds.


@pytest.mark.parametrize("seed", large_but(range(30), *range(10)))
def test_limits_hold_in_random_worlds(seed: int) -> None:
    """With preemption, beams, lost workers and restarts: `LimitedWorld` checks the limits after each action."""
    run_world(LimitedWorld(seed, 1 + 3 * (seed % 3 == 0)), 1000)


def test_random_worlds_hold_sequences_back() -> None:
    """Otherwise the test above would prove nothing."""
    most_held, refused = 0, set[Failure]()
    for seed in range(10):
        world = LimitedWorld(seed)
        for _ in range(700):
            world.act()
            most_held = max(most_held, len(world.world.scheduler.waiting.accounts))
        refused |= set(world.world.refused)
    assert most_held > 5
    assert {Failure.TENANT_OVER_QUOTA, Failure.TOO_MANY_TOKENS, Failure.SEARCH_TOO_WIDE} <= refused
