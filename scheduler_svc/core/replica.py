"""A replica: one worker's blocks, its prefix index, and the sequences that live there."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.prefix import PrefixIndex, extend_hashes, root_hash
from scheduler_svc.core.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a worker says of itself, as far as scheduling needs it."""

    fingerprint: bytes
    block_size: int
    num_blocks: int
    context_length: int
    max_step_tokens: int
    max_sequences: int


class Replica:
    """Blocks and sequences of one worker, for as long as its step stream lives.

    Owners of blocks are the sequences in `running`, and those in `leaving`, which have ended or were preempted while a
    step in flight still names them.
    """

    def __init__(self, shape: ReplicaShape) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks)
        self.index = PrefixIndex(shape.block_size)
        self.running: list[Sequence] = []  # by order: victims come from the end
        self.leaving: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.departed_ids: list[int] = []  # to tell the worker in the next step
        self.num_steps = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.shape.block_size)

    @property
    def num_owed(self) -> int:
        """Blocks that running sequences still need for tokens that they know."""
        return sum(self.num_blocks_for(s.num_known) - len(s.block_ids) for s in self.running if s.num_uncomputed > 1)

    @property
    def num_arriving(self) -> int:
        """Blocks that will be available once the steps in flight are done."""
        owners = Counter(block_id for s in self.leaving.values() for block_id in s.block_ids)
        return sum(self.pool.ref_count(block_id) == count for block_id, count in owners.items())

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks here that hold the beginning of a sequence's known tokens."""
        self._extend_hashes(sequence, len(sequence.tokens) // self.shape.block_size)
        return self.index.match(sequence.block_hashes, sequence.tokens)

    def admit(self, sequence: Sequence, hit: list[int]) -> None:
        """Let a queued sequence run here, sharing the blocks of `match`. Its last token is left to compute."""
        self.pool.share(hit)
        sequence.move(Phase.RUNNING)
        sequence.block_ids = list(hit)
        sequence.num_published = len(hit)
        sequence.num_computed = sequence.num_committed = min(len(hit) * self.shape.block_size, len(sequence.tokens) - 1)
        insort(self.running, sequence, key=lambda s: s.order)

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Add new blocks at the end of a sequence's table. There must be as many available."""
        taken = self.pool.allocate(count)
        assert taken is not None, "allocate without room"
        block_ids, evicted = taken
        self.index.forget(evicted)
        sequence.block_ids += block_ids

    def leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a running sequence off the replica, to the given phase; its blocks wait for the steps in flight."""
        self.running.remove(sequence)
        self.departed_ids.append(sequence.id)
        sequence.move(phase)
        self.leaving[sequence.id] = sequence
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> bool:
        """Release the blocks of a leaving sequence once no step in flight names them. Returns whether that is done."""
        if sequence.num_in_flight or sequence.id not in self.leaving:
            return False
        del self.leaving[sequence.id]
        self.pool.release(sequence.block_ids, keep=self.index.published(sequence.block_ids))
        sequence.forget_blocks()
        return True

    def publish(self, sequence: Sequence) -> None:
        """Tell the index of a sequence's blocks that its committed steps have filled."""
        num_full = sequence.num_committed // self.shape.block_size
        if num_full > sequence.num_published:
            self._extend_hashes(sequence, num_full)
            for block in range(sequence.num_published, num_full):
                self.index.publish(sequence.block_ids[block], sequence.block_hashes[block], sequence.tokens, block)
            sequence.num_published = num_full

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > len(sequence.block_hashes):
            root = root_hash(self.shape.fingerprint, sequence.request.salt)
            extend_hashes(sequence.block_hashes, root, sequence.tokens, self.shape.block_size, num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance: every block in one state, owned by those who list it."""
        owners = [*self.running, *self.leaving.values()]
        self.pool.check_integrity(Counter(block_id for s in owners for block_id in s.block_ids))
        for block_id in range(self.shape.num_blocks):
            if self.pool.is_cached(block_id):
                assert block_id in self.index, "a cached block cannot be found"
            elif self.pool.ref_count(block_id) == 0:
                assert block_id not in self.index, "a free block can be found"
        for sequence in self.running:
            assert sequence.phase is Phase.RUNNING
            assert sequence.num_committed <= sequence.num_computed <= sequence.num_known
            assert len(sequence.block_ids) >= self.num_blocks_for(sequence.num_computed)
        in_flight = Counter(part.sequence.id for plan in self.in_flight for part in plan.scheduled)
        assert all(in_flight[s.id] == s.num_in_flight for s in owners), "steps in flight do not add up"
        assert self.running == sorted(self.running, key=lambda s: s.order)
