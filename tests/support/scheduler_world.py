"""A scheduler over replicas of memory workers, whose answers lag behind their plans; and what must always hold.

Whatever is done to it, books balance, every text is right, and nobody is stuck. At every plan, allocation and
publication it is checked who may write, what may be handed out anew, and what may be found.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from memory_worker import Drawn, Memory, MemoryWorker, continuation, options
from scheduler_svc.core.beam_search import BeamParams, BeamSearch, num_candidates
from scheduler_svc.core.block_hash_report import TokenChain
from scheduler_svc.core.block_tier import BlockTier
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.plan import BlockPair, Direction, Event, FailedEvent, Failure, StepOutcome, StepPlan
from scheduler_svc.core.prefix import BlockContent
from scheduler_svc.core.replica import Replica, ReplicaShape
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, RestoredSequence

VOCAB_SIZE = 2
REFUSALS = {
    Failure.INVALID,
    Failure.SEARCH_TOO_WIDE,
    Failure.UNAVAILABLE,
    Failure.TENANT_OVER_QUOTA,
    Failure.DEADLINE_INFEASIBLE,
}


@dataclass
class Answer:
    """A step that its worker has executed, and the scheduler has not heard of. `named` are blocks of the device."""

    outcome: StepOutcome
    named: set[int]


class AuditedTier(BlockTier):
    """A tier that does not hand out what is still named, nor publish what is not committed."""

    def __init__(self, site: "Site", memory: Memory, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._site = site
        self._memory = memory

    def allocate(self, count: int) -> list[int] | None:
        block_ids = super().allocate(count)
        if block_ids is not None:
            named = self._site.named(self._memory)
            assert named.isdisjoint(block_ids), "a block is handed out that a step or a copy under way names"
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> int:
        self._check(block_id, content)
        return super().publish(block_id, content)

    def restore_cached_blocks(self, found: dict[int, BlockContent]) -> None:
        for block_id, content in found.items():
            self._check(block_id, content)
        super().restore_cached_blocks(found)

    def _check(self, block_id: int, content: BlockContent) -> None:
        slots, filled_by = self._memory.read(block_id)
        assert max(filled_by) <= self._site.num_committed, "a block is published before its step is committed"
        tokens = [slot[1] for slot in slots if slot is not None]
        assert content.tokens == b"".join(token.to_bytes(4, "little") for token in tokens), (
            "published is something else"
        )


class Site:
    """A replica, its worker, and the steps between them."""

    def __init__(self, shape: ReplicaShape, worker: MemoryWorker) -> None:
        self.replica = Replica(shape)
        self.worker = worker
        self.answers: deque[Answer] = deque()
        self.num_committed = 0  # steps
        self._in_progress: dict[tuple[int, Direction], list[BlockPair]] = {}  # as far as the scheduler knows
        self.replica.device = AuditedTier(self, self.worker.device, shape.num_blocks, shape.block_size)
        self.replica.host = AuditedTier(self, self.worker.host, shape.num_host_blocks, shape.block_size)
        self.replica.swaps._tiers = (self.replica.device, self.replica.host)

    def named(self, memory: Memory) -> set[int]:
        """Blocks of a memory that steps name of which the scheduler has not heard, or copies under way."""
        pairs = [pair for pairs in self._in_progress.values() for pair in pairs]
        if memory is self.worker.host:
            return {pair.host for pair in pairs}
        return {pair.device for pair in pairs}.union(*(answer.named for answer in self.answers))

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Have the worker do a step; the answer is to be put into `answers`."""
        self._check_writes(plan)
        for direction, pairs in ((Direction.OUT, plan.swap_out), (Direction.IN, plan.swap_in)):
            if pairs:
                self._in_progress[plan.step_id, direction] = pairs
        outcome = self.worker.step(plan)
        for part in plan.scheduled:
            assert self.worker.known[part.sequence.id].table == part.sequence.block_ids, "tables differ"
        return outcome

    def expect(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Keep an answer back."""
        named = {block_id for part in plan.scheduled for block_id in part.sequence.block_ids}
        named |= {block_id for copy in plan.copies for block_id in (copy.source, copy.destination)}
        self.answers.append(Answer(outcome, named))

    def take(self) -> StepOutcome:
        """The oldest answer, which the scheduler now hears of."""
        outcome = self.answers.popleft().outcome
        self.num_committed += 1
        for done in outcome.swaps:
            del self._in_progress[done.step_id, done.direction]
        return outcome

    def _check_writes(self, plan: StepPlan) -> None:
        pool, index = self.replica.device.pool, self.replica.device.index
        held = Counter(block_id for step in self.replica.in_flight for block_id in step.held_block_ids)
        size = self.replica.shape.block_size
        for part in plan.scheduled:
            first = max(part.start, part.num_cached_tokens)
            end = part.start + part.num_tokens + part.sequence.num_extra
            for block_id in part.sequence.block_ids[first // size : -(-end // size)]:
                assert pool.num_owners(block_id) - held[block_id] == 1, "a shared block is written"
                assert block_id not in index, "a block is written that can be found"
                assert not pool.is_pinned(block_id), "a block is written that a copy names"


class World:
    """A scheduler, its replicas, and all that anybody was told of any request."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self._met: Counter[str] = Counter()
        self.rng = rng
        self.sites: list[Site] = []
        self.outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], int | None] = {}  # to where it was cut, if it was
        self.failed: dict[str, Failure] = {}
        self.refused: Counter[Failure] = Counter()
        self.requests: dict[str, Request] = {}
        self.now = 0.0

    # What can be done.

    def join(self, shape: ReplicaShape) -> None:
        worker = MemoryWorker(
            shape.num_blocks,
            shape.block_size,
            VOCAB_SIZE,
            shape.num_host_blocks,
            self.rng,
            speculates=shape.max_new_tokens > 1,
        )
        self._add(Site(shape, worker))

    def _add(self, site: Site) -> None:
        self.sites.append(site)
        self.take(self.scheduler.add_replica(site.replica))

    @property
    def met(self) -> Counter[str]:
        """How often what happened: what all schedulers counted, and `adopted` blocks and `parted` replicas."""
        return self._met + Counter(asdict(self.scheduler.totals))

    @property
    def working(self) -> list[Site]:
        """Those that are given more."""
        return [site for site in self.sites if not site.replica.is_retired]

    def retire(self, site: Site) -> None:
        self.scheduler.retire(site.replica)

    def part(self) -> None:
        """Retired replicas that have nothing left go."""
        for site in [site for site in self.sites if site.replica.is_retired and site.replica.is_idle]:
            self.lose(site)
            self._met["parted"] += 1

    def restart(self) -> None:
        """The scheduler dies; another one goes on behind what was told, with what the workers' blocks still hold."""
        live = list(self.scheduler.keys)
        chains = [
            TokenChain(request.salt, [*request.prompt, *self.outputs[key, index]])
            for key in live
            for request in [self.requests[key]]
            for index in range(request.n if request.beam is None else 0)
        ]
        self._met.update(asdict(self.scheduler.totals))
        self.scheduler = Scheduler(self.limits)
        old, self.sites = self.sites, []
        for site in old:
            new = Site(site.replica.shape, site.worker)
            self._met["adopted"] += new.replica.restore_cached_blocks(site.worker.restart(), chains)
            new.replica.check_integrity()
            self._add(new)
        for key in live:
            refused = self.scheduler.submit(self.requests[key], self.now, self._restored(self.requests[key]))
            assert refused is None, refused
        assert list(self.scheduler.keys) == live

    def _restored(self, request: Request) -> list[RestoredSequence]:
        if request.beam is not None:
            return [RestoredSequence([], False)]
        places = [(request.key, index) for index in range(request.n)]
        return [RestoredSequence(list(self.outputs[place]), place in self.ended) for place in places]

    def lose(self, site: Site) -> None:
        self.sites.remove(site)
        self.take(self.scheduler.remove_replica(site.replica))

    def plan(self, site: Site, *, is_spoilt: bool = False) -> bool:
        """Make a step, and have it done; if it is spoilt, one of its rows fails. False: there is nothing to do."""
        plan = self.scheduler.schedule(site.replica, self.now)
        if plan is None:
            return False
        outcome = site.execute(plan)
        if is_spoilt and plan.scheduled:
            results = list(outcome.results)
            results[self.rng.randrange(len(results))] = Drawn([], failure="spoilt")
            outcome = replace(outcome, results=results)
        site.expect(plan, outcome)
        return True

    def hear(self, site: Site) -> None:
        """Tell the scheduler of the oldest step that is done."""
        if site.answers:
            self.take(self.scheduler.commit(site.replica, site.take(), self.now))

    def submit(self, request: Request) -> None:
        refused = self.scheduler.submit(request, self.now)
        if refused is None:
            self.requests[request.key] = request
        else:
            assert refused.reason in REFUSALS, refused
            self.refused[refused.reason] += 1

    def cancel(self, key: str) -> None:
        failed = self.scheduler.cancel(key)
        self.take([failed] if failed is not None else [])

    def cut(self, key: str, index: int) -> None:
        """The gateway found a stop string somewhere."""
        if (key, index) not in self.ended and key not in self.failed:
            length = self.rng.randint(0, len(self.outputs[key, index]))
            self.scheduler.finish(key, index, length)
            self.ended[key, index] = length

    def acknowledge(self, key: str, index: int) -> None:
        """The gateway has searched all that it was told."""
        self.scheduler.acknowledge(key, index, len(self.outputs[key, index]))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.scheduler.expire(self.now))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, FailedEvent):
                assert event.request.key not in self.failed, "failed twice"
                self.failed[event.request.key] = event.reason
                continue
            place = (event.sequence.request.key, event.sequence.index)
            assert place not in self.ended, "a token after the end"
            assert place[0] not in self.failed, "a token after a failure"
            assert event.offset == len(self.outputs[place]), "a gap or a repetition"
            self.outputs[place] += event.token_ids
            if event.end is not None:
                self.ended[place] = None

    # What must hold.

    def check_integrity(self) -> None:
        for site in self.sites:
            site.replica.check_integrity()

    @property
    def is_idle(self) -> bool:
        return not list(self.scheduler.keys) and not any(site.answers or site.worker.in_progress for site in self.sites)

    def drain(self) -> None:
        """Go on until nobody has anything to do. Nobody may be left by then."""
        assert self.working, "there is nobody to go on"
        for _ in range(20_000):
            is_busy = False
            for key, index in list(self.outputs):
                self.acknowledge(key, index)
            for site in self.sites:
                while self.plan(site):
                    is_busy = True
                if site.answers:
                    is_busy = True
                    self.hear(site)
                site.replica.check_integrity()
            if not is_busy:
                assert not list(self.scheduler.keys), "requests are stuck"
                return
        raise AssertionError("requests go round and round")

    def check_nothing_is_left(self) -> None:
        for site in self.sites:
            for tier in (site.replica.device, site.replica.host):
                counts = tier.pool.counts
                assert (counts.used, counts.in_flight) == (0, 0), "blocks leak"
                assert counts.free + counts.cached == tier.pool.num_blocks
        assert self.scheduler.num_queued == self.scheduler.num_running == 0
        assert self.scheduler.waiting.admission.num_requests == 0

    def check_texts(self) -> None:
        for key, request in self.requests.items():
            if request.beam is not None:
                self._check_beams(request, request.beam)
                continue
            expected = continuation(
                request.prompt, request.max_tokens, VOCAB_SIZE, request.stop_token_ids, request.min_tokens
            )
            for index in range(request.n):
                output = self.outputs.get((key, index), [])
                if key in self.failed or self.ended[key, index] is not None:
                    assert output == expected[: len(output)]
                else:
                    assert output == expected

    def _check_beams(self, request: Request, beam: BeamParams) -> None:
        if request.key in self.failed:
            return
        search = BeamSearch(beam, request.max_tokens, request.stop_token_ids, request.min_tokens)
        count = num_candidates(beam.width, len(request.stop_token_ids))
        while not search.is_over:
            search.advance([options([*request.prompt, *one.tokens], VOCAB_SIZE, count) for one in search.beams])
        found = [one.tokens for one in search.finished[: request.n]]
        assert [self.outputs[request.key, index] for index in range(len(found))] == found
