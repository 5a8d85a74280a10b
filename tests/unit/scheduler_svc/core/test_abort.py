"""Cancellation at any point: nothing of the requests is left, and others are not affected."""

import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy

import pytest

from scheduler_svc.core.events import Failure
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Request
from scheduler_world import World

SHAPE = ReplicaShape(
    fingerprint=b"model",
    block_size=4,
    num_blocks=24,
    context_length=1000,
    max_step_tokens=16,
    max_sequences=8,
    num_host_blocks=40,
    block_bytes=1000,
    swap_bytes_per_second=1e8,
    prefill_tokens_per_second=1000.0,
)
COMMON = [0, 1, 1, 0, 1, 0, 0, 1]
REQUESTS = [
    Request("chunks", [*COMMON, *[0, 0, 1] * 10], 1, 30),
    Request("siblings", [*COMMON, 1, 1], 3, 24),
    Request("beams", [1, 0, 1], 2, 12, beam=BeamParams(3, 1.0, EarlyStopping.NEVER)),
    Request("follower", [*COMMON, *[0, 0, 1] * 5], 1, 30, has_stop_strings=True),
]


class Story:
    """The same requests on the same worker, one action at a time."""

    def __init__(self) -> None:
        self.world = World(SchedulerLimits(policy="fcfs", preemption=PreemptionMode.SWAP), random.Random(5))
        self.world.add_worker(SHAPE)
        for request in REQUESTS:
            self.world.submit(request)
        self._site = self.world.sites[0]
        self._plans_next = True

    @property
    def is_over(self) -> bool:
        return self.world.is_idle and not self.world.scheduler.num_running

    def act(self) -> None:
        """Plans a step, or else commits one. Two are in flight whenever a second one can be planned."""
        if self._plans_next and self.world.plan(self._site):
            self._plans_next = len(self._site.answers) < 2
        else:
            self.world.commit(self._site)
            self._plans_next = True
        self.world.check_integrity()

    def end(self) -> None:
        """Runs to the end, and checks the final state."""
        self.world.drain()
        self.world.check_texts()
        self.world.check_nothing_is_left()
        assert not self._site.worker.known, "the worker still holds sequences"
        assert not self._site.replica.kv.swaps


def phases(story: Story) -> Counter[Phase]:
    scheduler = story.world.scheduler
    return Counter(sequence.phase for key in scheduler.keys for sequence in scheduler.sequences(key))


def stories(every: int = 1) -> Iterator[Story]:
    """Copies of the scenario at each of its points, or each so many-th, except for the end."""
    story = Story()
    for point in range(10_000):
        if story.is_over:
            return
        if point % every == 0:
            yield deepcopy(story)
        story.act()
    raise AssertionError("the story does not end")


def test_story_contains_every_phase_copies_chunks_and_forks() -> None:
    story = Story()
    seen: Counter[Phase] = Counter()
    num_copies = num_chunks = num_forked = 0
    while not story.is_over:
        before = len(story.world.sites[0].replica.steps_in_flight)
        story.act()
        seen.update(phases(story).keys())
        steps = story.world.sites[0].replica.steps_in_flight
        if len(steps) > before:
            plan = steps[-1]
            num_copies += len(plan.copies)
            num_chunks += sum(part.num_tokens > 1 and not part.samples for part in plan.scheduled)
        if story.world.scheduler.is_live("beams"):
            num_forked = max(num_forked, len(story.world.scheduler.sequences("beams")))
    alive = set(Phase) - {Phase.ENDED}
    assert set(seen) >= alive
    assert num_copies > 0
    assert num_chunks > 1
    assert num_forked == 3
    assert story.world.scheduler.totals.swaps > 2
    assert not story.world.failed


def test_nothing_is_left_whenever_all_is_cancelled() -> None:
    for story in stories():
        for key in list(story.world.scheduler.keys):
            story.world.cancel(key)
        story.world.check_integrity()
        story.end()


@pytest.mark.parametrize("key", [request.key for request in REQUESTS])
def test_others_end_right_whenever_one_is_cancelled(key: str) -> None:
    for story in stories(every=5):
        if not story.world.scheduler.is_live(key):
            break
        story.world.cancel(key)
        story.world.check_integrity()
        story.end()
        assert story.world.failed == {key: Failure.CANCELLED}
