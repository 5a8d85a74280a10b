"""A scheduler over replicas of memory workers, whose answers lag behind their plans; and what must always hold.

Whatever is done to it, after every operation books balance; and at every plan and every publication an auditor checks
who may write, what is handed out anew, and what may be found.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from memory_worker import Drawn, Memory, MemoryWorker, continuation, options
from scheduler_svc.core.beam_search import BeamSearch, num_candidates
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.plan import Event, FailedEvent, Failure, StepOutcome, StepPlan, TokensEvent
from scheduler_svc.core.prefix import Content
from scheduler_svc.core.replica import Replica, ReplicaShape
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.tier import Tier

VOCAB_SIZE = 2


@dataclass
class Pending:
    """A step that its worker has executed, and the scheduler not heard of."""

    plan: StepPlan
    outcome: StepOutcome
    named: set[int]  # blocks of the device


@dataclass
class Site:
    """A replica, its worker, and the steps between them. Checks what the replica does with its blocks."""

    replica: Replica
    worker: MemoryWorker
    pending: deque[Pending] = field(default_factory=deque)
    num_committed: int = 0  # steps

    def __post_init__(self) -> None:
        for tier, memory in ((self.replica.device, self.worker.device), (self.replica.host, self.worker.host)):
            self._watch_allocations(tier)
            self._watch_publications(tier, memory)

    def _watch_allocations(self, tier: Tier) -> None:
        allocate = tier.pool.allocate

        def audited(count: int) -> tuple[list[int], list[int]] | None:
            taken = allocate(count)
            if taken is not None:
                named = self._named_on_device() if tier is self.replica.device else self._named_on_host()
                assert named.isdisjoint(taken[0]), "a block is handed out that a step or a copy under way names"
            return taken

        _replace(tier.pool, "allocate", audited)

    def _watch_publications(self, tier: Tier, memory: Memory) -> None:
        publish = tier.index.publish

        def audited(block_id: int, content: Content) -> int:
            slots, filled_by = memory.read(block_id)
            assert max(filled_by) <= self.num_committed, "a block is published before its step is committed"
            tokens = [slot[1] for slot in slots if slot is not None]
            assert content.tokens == b"".join(token.to_bytes(4, "little") for token in tokens)
            return publish(block_id, content)

        _replace(tier.index, "publish", audited)

    def _named_on_device(self) -> set[int]:
        named = {pair.device for transfer in self.worker.under_way for pair in transfer.pairs}
        return named.union(*(step.named for step in self.pending))

    def _named_on_host(self) -> set[int]:
        """By transfers whose end the scheduler has not heard of, whether or not the worker has done them."""
        named = {pair.host for transfer in self.worker.under_way for pair in transfer.pairs}
        ended = {(done.step_id, done.direction) for step in self.pending for done in step.outcome.transfers}
        return named.union(
            pair.host
            for moves in (self.replica.transfers.under_way_pairs(*one) for one in ended)
            for pair in moves
        ) if False else named

    def execute(self, plan: StepPlan, spoil: Callable[[StepOutcome], StepOutcome]) -> None:
        """Have the worker do a step."""
        self._check_writes(plan)
        named = {block_id for part in plan.scheduled for block_id in part.sequence.block_ids}
        named |= {block_id for copy in plan.copies for block_id in (copy.source, copy.destination)}
        named |= {pair.device for pair in (*plan.swap_out, *plan.swap_in)}
        outcome = self.worker.step(plan)
        for part in plan.scheduled:
            assert self.worker.known[part.sequence.id].table == part.sequence.block_ids, "tables differ"
        self.pending.append(Pending(plan, spoil(outcome), named))

    def _check_writes(self, plan: StepPlan) -> None:
        replica = self.replica
        held = Counter(block_id for step in replica.in_flight for block_id in step.held_ids)
        for part in plan.scheduled:
            size, ids = replica.shape.block_size, part.sequence.block_ids
            first, end = max(part.start, part.store_start), part.start + part.num_tokens
            for block_id in ids[first // size : -(-end // size)]:
                assert replica.device.pool.num_owners(block_id) - held[block_id] == 1, "a shared block is written"
                assert block_id not in replica.device.index, "a block is written that can be found"
