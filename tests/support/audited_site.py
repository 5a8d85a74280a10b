"""A replica and its worker. Outcomes arrive later than their plans, and every plan and publication is checked."""

from collections import Counter, deque
from dataclasses import dataclass

from memory_worker import Memory, MemoryWorker
from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.manager import KVManager
from scheduler_svc.core.kv.prefix_index import BlockContent
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.step import BlockPair, Direction, StepOutcome, StepPlan, ValueResult


@dataclass
class Answer:
    """A step that the worker has executed and the scheduler has not committed. `named` holds its device blocks."""

    outcome: StepOutcome
    named: set[int]


class AuditedTier(BlockTier):
    """A tier that checks its blocks: it allocates no block that a step in flight names, and publishes only committed
    blocks.

    It knows the salt of each hash, and counts hashes that are published again after an eviction.
    """

    def __init__(self, site: "Site", memory: Memory, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._site = site
        self._memory = memory
        self._published: set[bytes] = set()
        self.num_published_again = 0

    def allocate(self, count: int) -> list[int] | None:
        block_ids = super().allocate(count)
        if block_ids is not None:
            named = self._site.named(self._memory)
            assert named.isdisjoint(block_ids), "a block is allocated that a step or a copy in progress names"
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> int:
        self._check(block_id, content)
        is_new = self.index.find(content) is None
        self.num_published_again += is_new and content.hash in self._published
        self._published.add(content.hash)
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
            "a block is published that holds something else"
        )


class Site:
    """A replica, its worker, and the steps in flight."""

    def __init__(self, shape: ReplicaShape, worker: MemoryWorker) -> None:
        self.replica = Replica(shape)
        self.worker = worker
        self.answers: deque[Answer] = deque()
        self.num_committed = 0  # steps
        self._in_progress: dict[tuple[int, Direction], list[BlockPair]] = {}  # as far as the scheduler knows
        device = AuditedTier(self, self.worker.device, shape.num_blocks, shape.block_size)
        host = AuditedTier(self, self.worker.host, shape.num_host_blocks, shape.block_size)
        self.replica.kv = KVManager(shape, self.replica.costs, device, host)

    def named(self, memory: Memory) -> set[int]:
        """Blocks that are named by steps in flight or by copies in progress."""
        pairs = [pair for pairs in self._in_progress.values() for pair in pairs]
        if memory is self.worker.host:
            return {pair.host for pair in pairs}
        return {pair.device for pair in pairs}.union(*(answer.named for answer in self.answers))

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Executes a step on the worker. The caller passes the outcome to `expect`."""
        self._check_writes(plan)
        for direction, pairs in ((Direction.OUT, plan.swap_out), (Direction.IN, plan.swap_in)):
            if pairs:
                self._in_progress[plan.step_id, direction] = pairs
        outcome = self.worker.step(plan)
        for part, result in zip(plan.scheduled, outcome.results, strict=True):
            if not isinstance(result, ValueResult):  # with which a sequence ends
                assert self.worker.known[part.sequence.id].table == part.sequence.block_ids, "tables differ"
        return outcome

    def expect(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Queue the outcome of a step."""
        named = {block_id for part in plan.scheduled for block_id in part.sequence.block_ids}
        named |= {block_id for copy in plan.copies for block_id in (copy.source, copy.destination)}
        self.answers.append(Answer(outcome, named))

    def take(self) -> StepOutcome:
        """Returns the oldest outcome, for the scheduler to commit."""
        outcome = self.answers.popleft().outcome
        self.num_committed += 1
        for done in outcome.swaps:
            del self._in_progress[done.step_id, done.direction]
        return outcome

    def check_salts(self) -> int:
        """Checks that sequences with different salts share no block. Returns how many sequences share blocks."""
        replica, num_shared = self.replica, 0
        owners = [*replica.running, *replica.indivisible, *replica.isolated, *replica.pending_free.values()]
        device: dict[int, bytes] = {}
        host: dict[int, bytes] = {}
        for sequence in (*owners, *replica.swapped):
            swapped_kv, salt = sequence.swapped_kv, sequence.request.salt
            device_ids = sequence.block_ids + (swapped_kv.kept_block_ids if swapped_kv is not None else [])
            num_shared += any(block_id in device for block_id in device_ids)
            for salts, block_ids in ((device, device_ids), (host, swapped_kv.host_ids if swapped_kv else [])):
                for block_id in block_ids:
                    assert salts.setdefault(block_id, salt) == salt, "a block is shared by two salts"
        return num_shared

    def _check_writes(self, plan: StepPlan) -> None:
        pool, index = self.replica.kv.device.pool, self.replica.kv.device.index
        held = Counter(block_id for step in self.replica.steps_in_flight for block_id in step.held_block_ids)
        size = self.replica.shape.block_size
        for part in plan.scheduled:
            first = max(part.start, part.num_cached_tokens)
            end = part.start + part.num_tokens + part.sequence.num_extra
            for block_id in part.sequence.block_ids[first // size : -(-end // size)]:
                assert pool.num_owners(block_id) - held[block_id] == 1, "a shared block is written"
                assert block_id not in index, "a block is written that can be found"
                assert not pool.is_pinned(block_id), "a block is written that a copy names"
