"""Random lives of many requests over few blocks: whatever happens, books balance and every text is right."""

import random
from collections import defaultdict, deque
from collections.abc import Iterable

import pytest

from memory_worker import Drawn, MemoryWorker, continuation
from scheduler_svc.core.plan import FailedEvent, Failure, TokensEvent
from scheduler_svc.core.replica import Replica, ReplicaShape
from scheduler_svc.core.scheduler import Limits, Scheduler
from scheduler_svc.core.sequence import Request


class World:
    """A scheduler over replicas of checksum workers, whose steps lag behind their plans."""

    def __init__(self, rng: random.Random, num_replicas: int) -> None:
        self.rng = rng
        self.shape = ReplicaShape(
            fingerprint=b"model",
            block_size=rng.choice([1, 2, 4]),
            num_blocks=rng.choice([12, 16, 40]),
            context_length=1000,
            max_step_tokens=rng.choice([3, 8, 64]),
            max_sequences=rng.choice([2, 5, 16]),
        )
        self.scheduler = Scheduler(Limits(rng.choice([5, 32]), 12))
        self.workers: dict[int, tuple[Replica, MemoryWorker, deque[list[Drawn]]]] = {}
        self.outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], int | None] = {}  # to where it was cut, if it was
        self.failed: dict[str, Failure] = {}
        self.requests: dict[str, Request] = {}
        self.now = 0.0
        for _ in range(num_replicas):
            self.join()

    def join(self) -> None:
        replica = Replica(self.shape)
        worker = MemoryWorker(self.shape.num_blocks, self.shape.block_size)
        self.workers[id(replica)] = (replica, worker, deque())
        self.scheduler.add_replica(replica)

    def act(self) -> None:
        replica, worker, results = self.rng.choice(list(self.workers.values()))
        action = self.rng.random()
        if action < 0.45:
            plan = self.scheduler.schedule(replica)
            if plan is not None:
                results.append(self.spoil(worker.step(plan)))
        elif action < 0.85:
            if results:
                self.take(self.scheduler.commit(replica, results.popleft()))
        elif action < 0.93:
            self.submit()
        elif action < 0.96 and self.requests:
            failed = self.scheduler.cancel(self.rng.choice(list(self.requests)))
            self.take([failed] if failed else [])
        elif action < 0.97:
            self.now += 1
            self.take(self.scheduler.expire(self.now))
        elif action < 0.985 and self.outputs:
            self.cut(*self.rng.choice(list(self.outputs)))
        elif action < 0.99:
            del self.workers[id(replica)]
            self.take(self.scheduler.remove_replica(replica))
            self.join()
        for each, _, _ in self.workers.values():
            each.check_integrity()

    def spoil(self, results: list[Drawn]) -> list[Drawn]:
        """Now and then a row fails."""
        if results and self.rng.random() < 0.01:
            results[self.rng.randrange(len(results))] = Drawn([], failure="spoilt")
        return results

    def submit(self) -> None:
        capacity = self.shape.num_blocks * self.shape.block_size
        length = self.rng.randint(1, capacity - 1)
        request = Request(
            key=str(len(self.requests)),
            prompt=[self.rng.randint(0, 1) for _ in range(length)],
            n=self.rng.choice([1, 1, 1, 3]),
            max_tokens=self.rng.randint(1, min(capacity - length, 12)),
            stop_token_ids=frozenset(self.rng.choice([(), (1,)])),
            salt=self.rng.choice([b"a", b"b"]),
            priority=self.rng.choice([0, 0, 1]),
            min_tokens=self.rng.choice([0, 0, 3]),
            deadline=self.rng.choice([None, None, self.now + self.rng.randint(1, 20)]),
            has_stop_strings=self.rng.random() < 0.2,
        )
        self.requests[request.key] = request
        assert self.scheduler.submit(request) is None

    def cut(self, key: str, index: int) -> None:
        if (key, index) not in self.ended and key not in self.failed:
            length = self.rng.randint(0, len(self.outputs[key, index]))
            self.scheduler.finish(key, index, length)
            self.ended[key, index] = length

    def take(self, events: Iterable[TokensEvent | FailedEvent]) -> None:
        for event in events:
            if isinstance(event, FailedEvent):
                self.failed[event.request.key] = event.reason
                continue
            place = (event.sequence.request.key, event.sequence.index)
            assert place not in self.ended, "a token after the end"
            assert event.offset == len(self.outputs[place]), "a gap or a repetition"
            self.outputs[place] += event.token_ids
            if event.end is not None:
                self.ended[place] = None

    def drain(self) -> None:
        for _ in range(100_000):
            if not list(self.scheduler.keys) and not any(results for _, _, results in self.workers.values()):
                return
            for replica, worker, results in self.workers.values():
                while (plan := self.scheduler.schedule(replica)) is not None:
                    results.append(worker.step(plan))
                if results:
                    self.take(self.scheduler.commit(replica, results.popleft()))
                replica.check_integrity()
        raise AssertionError("requests are stuck")

    def check_texts(self) -> None:
        for key, request in self.requests.items():
            expected = continuation(request.prompt, request.max_tokens, 2, request.stop_token_ids, request.min_tokens)
            for index in range(request.n):
                output = self.outputs.get((key, index), [])
                if key in self.failed or self.ended[key, index] is not None:
                    assert output == expected[: len(output)]
                else:
                    assert output == expected
        assert set(self.failed.values()) <= {Failure.CANCELLED, Failure.DEADLINE_EXCEEDED, Failure.INTERNAL}


def test_random_lives_meet_preemption_and_the_prefix_cache() -> None:
    """Else the test below would prove nothing of them."""
    world = World(random.Random(3), num_replicas=1)
    for _ in range(1500):
        world.act()
    assert world.scheduler.totals.preemptions > 0
    assert world.scheduler.totals.cache_hits > 0
    assert Failure.DEADLINE_EXCEEDED in world.failed.values()
    assert Failure.INTERNAL in world.failed.values()


@pytest.mark.parametrize("seed", range(60))
def test_books_balance_and_texts_are_right(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng, num_replicas=rng.choice([1, 1, 2]))
    for _ in range(1500):
        world.act()
    world.drain()
    world.check_texts()
    for replica, _, _ in world.workers.values():
        counts = replica.pool.counts
        assert counts.used == 0
        assert counts.free + counts.cached == replica.shape.num_blocks
    assert world.scheduler.num_queued == 0
