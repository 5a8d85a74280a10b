"""Long prompts beside new requests for which they are limited: they are slower, and all of them end."""

import random
from typing import Any

import pytest

from core_bench import BLOCK, CoreBench, prompt
from large import large_but
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionMode

NUM_SLOTS = 8
PROMPT, OUTPUT = 400, 300  # tokens of a job, at most
NUM_JOBS = 20
CHAT_EVERY = 5  # steps


class FloodWithChats:
    """A tenant's jobs with long prompts take all slots and blocks; another tenant's chats come every few steps."""

    def __init__(self, seed: int, preemption: PreemptionMode) -> None:
        self._rng = random.Random(seed)
        self.bench = CoreBench(
            limits=SchedulerLimits(policy="fair", preemption=preemption),
            max_sequences=NUM_SLOTS,
            max_step_tokens=64,
            num_blocks=NUM_SLOTS * (PROMPT + OUTPUT) // BLOCK // 2,
            num_host_blocks=0 if preemption is PreemptionMode.RECOMPUTE else NUM_SLOTS * (PROMPT + OUTPUT) // BLOCK,
        )
        self.num_limited = 0  # steps
        for number in range(NUM_JOBS):
            self.bench.submit(
                f"job-{number}",
                prompt(self._rng.randrange(PROMPT // 4, PROMPT), 10_000 * number),
                self._rng.randrange(OUTPUT // 4, OUTPUT),
                tenant="jobs",
                priority=self._rng.choice([-1, 0]),
            )

    def steps_until_jobs_end(self, most: int, chat_every: int | None) -> int:
        """Runs until all jobs have ended. A chat comes every so many steps."""
        bench, num_steps = self.bench, 0
        while any(key.startswith("job") for key in bench.scheduler.keys):
            assert num_steps < most, "jobs make no progress"
            if chat_every is not None and num_steps % chat_every == 0:
                bench.submit(f"chat-{num_steps}", prompt(20, 1_000_000 + 1000 * num_steps), 3, tenant="chats")
            bench.now += 0.05
            bench.step()
            num_steps += 1
            self.num_limited += bool(bench.scheduler.capacity.for_new_requests.prompt_limit(bench.replica))
        return num_steps


@pytest.mark.parametrize("preemption", list(PreemptionMode))
@pytest.mark.parametrize("seed", large_but(range(3), 0))
def test_all_jobs_end_while_chats_come(seed: int, preemption: PreemptionMode) -> None:
    alone = FloodWithChats(seed, preemption).steps_until_jobs_end(10_000, None)
    world = FloodWithChats(seed, preemption)
    num_steps = world.steps_until_jobs_end(3 * alone, CHAT_EVERY)
    assert world.num_limited > num_steps / 3
    assert world.bench.scheduler.totals.preemptions > 0


def limited(bench: CoreBench) -> list[bool]:
    """Whether prompts are limited, by replica."""
    reserve = bench.scheduler.capacity.for_new_requests
    return [bool(reserve.prompt_limit(replica)) for replica in bench.scheduler.replicas]


def with_jobs(num_jobs: int, **shape: Any) -> CoreBench:
    """A tenant's jobs run, and have run for long enough to yield."""
    bench = CoreBench(policy="fair", max_sequences=8, **shape)
    for number in range(num_jobs):
        bench.submit(f"job-{number}", prompt(20, 10_000 * number), 300, tenant="jobs")
    bench.steps(2 * MIN_STEPS)
    return bench


def test_prompts_are_limited_for_a_request_that_lacks_a_slot() -> None:
    bench = with_jobs(8, num_blocks=2000)
    bench.submit("chat", prompt(20, 900_000), 1, tenant="chats")
    bench.step()
    assert limited(bench) == [True]


def test_prompts_are_limited_for_a_request_that_lacks_only_blocks() -> None:
    bench = with_jobs(7, num_blocks=100)
    assert bench.replica.num_slots == 7
    bench.submit("chat", prompt(20, 900_000), 1, tenant="chats")
    assert bench.replica.kv.num_available < 20 // BLOCK + 1 + 8
    bench.step()
    assert limited(bench) == [True]


def test_prompts_are_not_limited_for_a_request_that_finds_slot_and_blocks() -> None:
    bench = with_jobs(7, num_blocks=2000)
    bench.submit("chat", prompt(20, 900_000), 1, tenant="chats")
    bench.step()
    assert limited(bench) == [False]


def test_prompts_are_not_limited_for_a_request_that_another_worker_admits() -> None:
    bench = with_jobs(8, num_blocks=2000)
    bench.join(max_sequences=8, num_blocks=2000)
    bench.submit("chat", prompt(20, 900_000), 1, tenant="chats")
    bench.step()
    assert limited(bench) == [False, False]
