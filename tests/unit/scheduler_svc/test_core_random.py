"""Random lives of many requests over few blocks: whatever happens, books balance and every text is right."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from memory_worker import MemoryWorker
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.beam_search import BeamParams, EarlyStopping
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.plan import Failure
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.replica import ReplicaShape
from scheduler_svc.core.sequence import Request
from scheduler_world import World

NUM_LIVES = 100
NUM_ACTIONS = 2000  # in each; together 200,000


class Life:
    """A world, and somebody who does one thing after another to it."""

    def __init__(self, seed: int, max_new_tokens: int = 1) -> None:
        rng = self.rng = random.Random(seed)
        self.shape = ReplicaShape(
            fingerprint=b"model",
            block_size=rng.choice([1, 2, 3, 4]),
            num_blocks=rng.choice([16, 23, 40, 64]),
            context_length=1000,
            max_step_tokens=rng.choice([3, 16, 64]),
            max_sequences=rng.choice([3, 8, 16]),
            num_host_blocks=rng.choice([0, 1, 7, 40, 200]),
            block_bytes=1000,
            swap_bytes_per_second=rng.choice([1e4, 1e6]),
            prefill_tokens_per_second=rng.choice([100.0, 1e4]),
        )
        if max_new_tokens > 1:  # only slots of blocks that are needed anyway hold speculated tokens
            self.shape = replace(self.shape, max_new_tokens=max_new_tokens, block_size=rng.choice([2, 4, 8]))
        self.beginnings = [[rng.randint(0, 1) for _ in range(200)] for _ in range(rng.choice([2, 8]))]
        self.share_of_common = rng.choice([0.1, 0.9])  # of the requests
        self.share_of_beams = rng.choice([0.02, 0.4])
        limits = SchedulerLimits(
            max_step_tokens=rng.choice([8, 32]),
            max_sequences=12,
            queue=AdmissionLimits(max_requests=rng.choice([8, 30]), max_tenant_requests=rng.choice([5, 30])),
            policy=rng.choice(["fcfs", "priority", "fair"]),
            preemption=rng.choice(list(PreemptionMode)),
        )
        self.world = World(limits, rng)
        self.share_of_losses = rng.choice([0.002, 0.002, 0.05])  # of what happens
        self.num_sites = rng.choice([1, 1, 2, 3])
        for _ in range(self.num_sites):
            self.join()

    def join(self) -> None:
        """Workers of one model need not have equally much memory."""
        num_blocks = self.shape.num_blocks + self.rng.choice([0, 0, 5])
        self.world.join(replace(self.shape, num_blocks=num_blocks))

    def act(self) -> None:
        world, rng = self.world, self.rng
        action = rng.random()
        if len(world.working) < self.num_sites and action < 0.05:
            self.join()
        elif world.sites and rng.random() < self.share_of_losses:
            world.lose(rng.choice(world.sites))
        elif action < 0.45:
            if world.sites:
                world.plan(rng.choice(world.sites), is_spoilt=rng.random() < 0.002)
        elif action < 0.89:
            if world.sites:
                world.hear(rng.choice(world.sites))
                world.part()
        elif action < 0.96:
            world.submit(self.request())
        elif action < 0.98:
            if world.outputs:
                world.acknowledge(*rng.choice(list(world.outputs)))
        elif action < 0.985:
            if keys := list(world.scheduler.keys):
                world.cancel(rng.choice(keys))
        elif action < 0.99:
            world.wait(1.0)
        elif action < 0.995:
            if world.outputs:
                world.cut(*rng.choice(list(world.outputs)))
        elif action < 0.997:
            if world.sites:
                world.retire(rng.choice(world.sites))
        elif action < 0.9985:
            world.restart()
        elif action < 0.9987:
            for key in list(world.scheduler.keys):
                world.cancel(key)
        world.check_integrity()

    def request(self) -> Request:
        rng, now = self.rng, self.world.now
        capacity = self.shape.num_blocks * self.shape.block_size
        length = rng.randint(1, capacity - 1 if rng.random() < 0.03 else capacity // 8)
        prompt = [rng.randint(0, 1) for _ in range(length)]
        if rng.random() < self.share_of_common:  # one that others begin with too
            prompt = [*rng.choice(self.beginnings)[: capacity // rng.choice([3, 8])], *prompt][: capacity - 1]
        most_output = min(capacity - len(prompt), rng.choice([3, capacity // 3, capacity // 2, 90]))
        beam = None
        if rng.random() < self.share_of_beams:
            beam = BeamParams(rng.choice([2, 2, 3]), rng.choice([-1.0, 0.0, 1.0]), rng.choice(list(EarlyStopping)))
        return Request(
            key=str(len(self.world.requests)),
            prompt=prompt,
            n=rng.choice([1, 1, 1, 3]) if beam is None else 2,
            max_tokens=rng.randint(1, most_output),
            beam=beam,
            stop_token_ids=frozenset(rng.choice([(), (), (1,)])),
            salt=rng.choice([b"a", b"b"]),
            priority=rng.choice([0, 0, 1]),
            min_tokens=rng.choice([0, 0, 3, 10]),
            deadline=rng.choice([None, None, None, now + rng.randint(1, 20)]),
            has_stop_strings=beam is None and rng.random() < 0.2,
            tenant=rng.choice(["x", "y"]),
            weight=rng.choice([1.0, 2.0]),
            arrived_at=now,
        )


def test_random_lives_meet_all_that_they_are_to_prove() -> None:
    """Else the test below would prove nothing of it."""
    met: Counter[str] = Counter()
    failures: set[Failure] = set()
    for seed in range(16):
        life = Life(seed)
        for _ in range(1500):
            life.act()
        met.update(life.world.met)
        failures |= set(life.world.failed.values())
    for what in ("preemptions", "swaps", "cache_hits", "host_hits", "adopted", "parted"):
        assert met[what] > 20, what
    assert met["preemptions"] - met["swaps"] > 20
    assert {Failure.DEADLINE_EXCEEDED, Failure.INTERNAL, Failure.QUARANTINED} <= failures


@pytest.mark.parametrize("seed", range(NUM_LIVES))
def test_books_balance_and_texts_are_right(seed: int) -> None:
    life = Life(seed)
    for _ in range(NUM_ACTIONS):
        life.act()
    while len(life.world.working) < life.num_sites:
        life.join()
    life.world.drain()
    life.world.check_texts()
    life.world.check_nothing_is_left()


@pytest.mark.parametrize("max_new_tokens", [2, 4, 7])
def test_random_lives_of_workers_that_speculate(max_new_tokens: int) -> None:
    """Steps return 0 to k tokens a sequence: books balance, texts are right, and refused tokens are never published."""
    met: Counter[str] = Counter()
    returned: Counter[int] = Counter()
    for seed in range(NUM_LIVES // 2):
        life = Life(1000 + seed, max_new_tokens)
        workers: dict[int, MemoryWorker] = {}
        for _ in range(NUM_ACTIONS // 2):
            life.act()
            workers |= {id(site.worker): site.worker for site in life.world.sites}
        if not life.world.working:
            life.join()
        life.world.drain()
        life.world.part()
        life.world.check_texts()
        life.world.check_nothing_is_left()
        met.update(life.world.met)
        for worker in workers.values():
            returned.update(worker.num_returned)
    assert all(returned[num_tokens] > 20 for num_tokens in range(max_new_tokens + 1))
    assert met["swaps"] > 10
    assert met["preemptions"] - met["swaps"] > 20
    assert met["adopted"] > 20
