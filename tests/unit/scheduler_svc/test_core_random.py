"""Random lives of many requests over few blocks: whatever happens, books balance and every text is right."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, replace

import pytest

from memory_worker import Drawn, MemoryWorker, continuation, options
from scheduler_svc.core.beam_search import BeamParams, BeamSearch, EarlyStopping, num_candidates
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.plan import FailedEvent, Failure, StepOutcome, TokensEvent
from scheduler_svc.core.pressure import PreemptionMode
from scheduler_svc.core.replica import Replica, ReplicaShape
from scheduler_svc.core.scheduler import Scheduler
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
            num_host_blocks=rng.choice([0, 6, 40]),
            block_bytes=1000,
            swap_bytes_per_second=1e6,
            prefill_tokens_per_second=rng.choice([100.0, 1e5]),
        )
        limits = Limits(rng.choice([5, 32]), 12, policy=rng.choice(["fcfs", "priority", "fair"]))
        self.scheduler = Scheduler(replace(limits, preemption=rng.choice(list(PreemptionMode))))
        self.workers: dict[int, tuple[Replica, MemoryWorker, deque[StepOutcome]]] = {}
        self.outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], int | None] = {}  # to where it was cut, if it was
        self.failed: dict[str, Failure] = {}
        self.requests: dict[str, Request] = {}
        self.now = 0.0
        for _ in range(num_replicas):
            self.join()

    def join(self) -> None:
        replica = Replica(self.shape)
        shape = self.shape
        worker = MemoryWorker(shape.num_blocks, shape.block_size, 2, shape.num_host_blocks, self.rng)
        self.workers[id(replica)] = (replica, worker, deque())
        self.scheduler.add_replica(replica)

    def act(self) -> None:
        replica, worker, results = self.rng.choice(list(self.workers.values()))
        action = self.rng.random()
        if action < 0.45:
            plan = self.scheduler.schedule(replica, self.now)
            if plan is not None:
                results.append(self.spoil(worker.step(plan)))
        elif action < 0.85:
            if results:
                self.take(self.scheduler.commit(replica, results.popleft(), self.now))
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

    def spoil(self, outcome: StepOutcome) -> StepOutcome:
        """Now and then a row fails."""
        results = list(outcome.results)
        if results and self.rng.random() < 0.01:
            results[self.rng.randrange(len(results))] = Drawn([], failure="spoilt")
        return replace(outcome, results=results)

    def submit(self) -> None:
        capacity = self.shape.num_blocks * self.shape.block_size
        length = self.rng.randint(1, self.rng.choice([capacity // 4, capacity // 4, capacity - 1]))
        beam = None
        max_tokens = self.rng.randint(1, min(capacity - length, 40))
        if self.rng.random() < 0.1:
            beam = BeamParams(2, 1.0, self.rng.choice(list(EarlyStopping)))
        request = Request(
            key=str(len(self.requests)),
            prompt=[self.rng.randint(0, 1) for _ in range(length)],
            n=self.rng.choice([1, 1, 1, 3]) if beam is None else 2,
            max_tokens=max_tokens,
            beam=beam,
            stop_token_ids=frozenset(self.rng.choice([(), (1,)])),
            salt=self.rng.choice([b"a", b"b"]),
            priority=self.rng.choice([0, 0, 1]),
            min_tokens=self.rng.choice([0, 0, 3]),
            deadline=self.rng.choice([None, None, self.now + self.rng.randint(1, 20)]),
            has_stop_strings=self.rng.random() < 0.2,
            tenant=self.rng.choice(["x", "y"]),
            arrived_at=self.now,
        )
        refused = self.scheduler.submit(request, self.now)
        if refused is None:
            self.requests[request.key] = request
        else:
            assert (beam is not None, refused.reason) == (True, Failure.INVALID)

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
            if (
                not list(self.scheduler.keys)
                and not any(results for _, _, results in self.workers.values())
                and not any(worker.under_way for _, worker, _ in self.workers.values())
            ):
                return
            for replica, worker, results in self.workers.values():
                while (plan := self.scheduler.schedule(replica, self.now)) is not None:
                    results.append(worker.step(plan))
                if results:
                    self.take(self.scheduler.commit(replica, results.popleft(), self.now))
                replica.check_integrity()
        raise AssertionError("requests are stuck")

    def check_texts(self) -> None:
        for key, request in self.requests.items():
            if request.beam is not None:
                self.check_beams(key, request, request.beam)
                continue
            expected = continuation(request.prompt, request.max_tokens, 2, request.stop_token_ids, request.min_tokens)
            for index in range(request.n):
                output = self.outputs.get((key, index), [])
                if key in self.failed or self.ended[key, index] is not None:
                    assert output == expected[: len(output)]
                else:
                    assert output == expected
        assert set(self.failed.values()) <= {Failure.CANCELLED, Failure.DEADLINE_EXCEEDED, Failure.INTERNAL}

    def check_beams(self, key: str, request: Request, beam: BeamParams) -> None:
        if key in self.failed or any(self.ended.get((key, index)) is not None for index in range(request.n)):
            return
        search = BeamSearch(beam, request.max_tokens, request.stop_token_ids, request.min_tokens)
        count = num_candidates(beam.width, len(request.stop_token_ids))
        while not search.is_over:
            search.advance([options([*request.prompt, *one.tokens], 2, count) for one in search.beams])
        found = dict(enumerate([one.tokens for one in search.finished]))
        assert {index: self.outputs[key, index] for index in found} == found


def test_random_lives_meet_all_that_they_are_to_prove() -> None:
    """Else the test below would prove nothing of it."""
    met: Counter[str] = Counter()
    failures = set()
    for seed in range(16):
        world = World(random.Random(seed), num_replicas=1)
        for _ in range(1500):
            world.act()
        met.update(asdict(world.scheduler.totals))
        failures |= set(world.failed.values())
    for what in ("preemptions", "swaps", "cache_hits", "host_hits"):
        assert met[what] > 5, what
    assert met["preemptions"] - met["swaps"] > 20
    assert {Failure.DEADLINE_EXCEEDED, Failure.INTERNAL} <= failures


@pytest.mark.parametrize("seed", range(60))
def test_books_balance_and_texts_are_right(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng, num_replicas=rng.choice([1, 1, 2]))
    for _ in range(1500):
        world.act()
    world.drain()
    world.check_texts()
    for replica, _, _ in world.workers.values():
        for tier in (replica.device, replica.host):
            counts = tier.pool.counts
            assert (counts.used, counts.in_flight) == (0, 0)
            assert counts.free + counts.cached == tier.pool.num_blocks
    assert world.scheduler.num_queued == 0
