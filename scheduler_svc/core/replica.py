"""A replica: one worker's two tiers of blocks, the copies between them, and the sequences that live there."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from scheduler_svc.core.block_hash_report import BlockHashMatcher, BlockHashReport, TokenChain
from scheduler_svc.core.block_tier import BlockTier
from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.plan import BlockCopy, BlockPair, BlockTableUpdate, Direction, StepPlan, SwapDone
from scheduler_svc.core.prefix import BlockContent, extend_hashes, pack_block, root_hash
from scheduler_svc.core.sequence import Phase, Sequence, SwappedKV
from scheduler_svc.core.swap import Swap, SwapManager

_BACKUPS_PER_STEP = 16  # cached blocks, of those that would go first, that a step may copy to the host


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a worker says of itself, as far as scheduling needs it.

    Rates are those it measured as it started, per second: bytes swapped, and tokens of prompts computed.
    """

    fingerprint: bytes
    block_size: int
    num_blocks: int
    context_length: int
    max_step_tokens: int
    max_sequences: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    swap_bytes_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    max_new_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Hit:
    """What a replica holds of a sequence's beginning: blocks on the device, blocks on the host behind these, and the
    block of a sibling that begins with what is left of the prompt.
    """

    device_ids: list[int]
    host_ids: list[int] = field(default_factory=list)
    partial_id: int | None = None

    @property
    def num_full(self) -> int:
        """Full blocks."""
        return len(self.device_ids) + len(self.host_ids)


class Replica:
    """Blocks and sequences of one worker, for as long as its step stream lives.

    Device blocks are owned by the sequences in `running`; by those in `pending_free`, which ended or were preempted
    while a step in flight still names them; by the `SwappedKV` of sequences in `swapped` and `pending_free`; and by
    steps in flight (`StepPlan.held_block_ids`). Host blocks are owned by `SwappedKV`.
    """

    def __init__(self, shape: ReplicaShape, name: str = "") -> None:
        """`name` is the worker's, for the operator."""
        self.shape = shape
        self.name = name
        self.device = BlockTier(shape.num_blocks, shape.block_size)
        self.host = BlockTier(shape.num_host_blocks, shape.block_size)
        self.swaps = SwapManager(self.device, self.host)
        self.costs = CostModel(shape.block_bytes, shape.swap_bytes_per_second, shape.prefill_tokens_per_second)
        self.running: list[Sequence] = []  # by order
        self.swapped: list[Sequence] = []  # by order
        self.pending_free: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.num_steps = 0
        self.is_retired = False  # it is given no more than it has
        # For the next step to tell the worker.
        self.finished_ids: list[int] = []
        self._copies: list[BlockCopy] = []
        self._block_table_updates: list[BlockTableUpdate] = []
        self._swapping_in: dict[int, Swap] = {}  # by sequence id, what it waits for
        self._computing: dict[bytes, Sequence] = {}  # by hash, who is about to compute a block

    def restore_cached_blocks(self, hash_report: BlockHashReport, chains: Iterable[TokenChain]) -> int:
        """Have blocks found again that the worker kept, of those whose label is recomputed from a chain; how many.

        Labels that no chain leads to are ignored, with all that comes behind a block that is in neither tier, and so
        are blocks that are not there. Before the first step only.
        """
        assert not self.num_steps, "a replica that is at work adopts no blocks"
        if not hash_report.device and not hash_report.host:
            return 0
        sizes = self.shape.num_blocks, self.shape.num_host_blocks
        matcher = BlockHashMatcher(hash_report, self.shape.fingerprint, self.shape.block_size, sizes)
        for chain in chains:
            matcher.match(chain)
        self.device.restore_cached_blocks(matcher.device)
        self.host.restore_cached_blocks(matcher.host)
        return len(matcher.device) + len(matcher.host)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is here, nor a step in flight."""
        return not (self.running or self.swapped or self.pending_free or self.in_flight)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.shape.block_size)

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence has no place in its blocks."""
        return len(sequence.block_ids) * self.shape.block_size <= sequence.num_computed + sequence.num_extra

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before a running sequence computes more tokens, whatever its steps in flight return."""
        end = sequence.num_computed + sequence.num_extra + num_tokens
        return self.num_blocks_for(end) - len(sequence.block_ids)

    def num_extra_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """How many tokens a step that samples may return beyond the first: none that would take another block."""
        request = sequence.request
        if request.beam is not None:
            return 0
        num_output = sequence.num_known - len(request.prompt) + sequence.num_extra + 1
        end = sequence.num_computed + sequence.num_extra + num_tokens
        num_slots = self.num_blocks_for(end) * self.shape.block_size - end
        return min(self.shape.max_new_tokens - 1, request.max_tokens - num_output, num_slots)

    @property
    def num_pending_free(self) -> int:
        """Blocks that will be available once the steps and copies under way are done."""
        pool = self.device.pool
        ends = Counter(block_id for s in self.pending_free.values() for block_id in s.block_ids)
        ends.update(block_id for plan in self.in_flight for block_id in plan.held_block_ids)
        pins, _ = self.swaps.pins()
        return sum(pool.num_owners(block_id) == ends[block_id] for block_id in ends.keys() | pins.keys())

    @property
    def is_short_of_free_blocks(self) -> bool:
        """Whether cached blocks will soon be given up."""
        return self.device.pool.num_free * 8 < self.shape.num_blocks

    @property
    def has_pending_updates(self) -> bool:
        """Whether the worker has something to do or to hear of beside computing."""
        return bool(self.finished_ids) or self.swaps.has_waiting

    # Sequences come.

    def match(self, sequence: Sequence) -> Hit:
        """What is here of a sequence's known tokens, where bringing it costs less than computing it."""
        self._extend_hashes(sequence, len(sequence.tokens) // self.shape.block_size)
        device_ids = self.device.index.match(sequence.block_hashes, sequence.tokens)
        host_ids = self.host.index.match(sequence.block_hashes, sequence.tokens, len(device_ids))
        if host_ids:
            computing = self.costs.recompute_seconds(
                len(host_ids) * self.shape.block_size, len(device_ids) * self.shape.block_size
            )
            if computing < self.costs.swap_seconds(0, len(host_ids)):
                host_ids = []
        return Hit(device_ids, host_ids)

    def leader_of(self, sequence: Sequence, hit: Hit) -> tuple[Sequence, int] | None:
        """Who is about to compute the block behind a hit, and how many tokens from the start both share."""
        hashes, end = sequence.block_hashes, hit.num_full
        leader = self._computing.get(hashes[end]) if end < len(hashes) else None
        if leader is None:
            return None
        while end < len(hashes) and self._computing.get(hashes[end]) is leader:
            end += 1
        return leader, end * self.shape.block_size

    def num_needed(self, sequence: Sequence, hit: Hit) -> int:
        """Blocks that must be available for a sequence to come in with all that it knows."""
        revived = sum(self.device.pool.is_cached(block_id) for block_id in hit.device_ids)
        return self.num_blocks_for(len(sequence.tokens)) - len(hit.device_ids) + revived

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Let a queued sequence run here with what `match` found; there is room. Its last token is left to compute."""
        self.device.pool.share(hit.device_ids)
        sequence.block_ids = list(hit.device_ids)
        sequence.num_published = len(hit.device_ids)
        sequence.num_stored = hit.num_full * self.shape.block_size
        if hit.host_ids:
            self._swap_in_blocks(sequence, hit.host_ids)
        if hit.partial_id is not None:
            self._copy(hit.partial_id, sequence)
            sequence.num_stored = len(sequence.tokens)
        self._enter(sequence, sequence.num_stored)
        for block in range(hit.num_full, len(sequence.block_hashes)):
            self._computing.setdefault(sequence.block_hashes[block], sequence)

    def num_needed_to_resume(self, sequence: Sequence) -> int:
        """Blocks that must be available for a swapped sequence to come back."""
        assert sequence.swapped_kv is not None
        swapped = sequence.swapped_kv
        # Blocks for tokens that were speculated and refused come back with the others.
        num_kept = len(swapped.kept_block_ids)
        return max(self.num_blocks_for(len(sequence.tokens)) - num_kept, len(swapped.host_ids))

    def resume(self, sequence: Sequence) -> None:
        """Let a swapped sequence run again; there is room. What can still be found on the device is not moved."""
        swapped_kv = sequence.swapped_kv
        assert swapped_kv is not None
        assert not swapped_kv.num_swapping
        self.swapped.remove(sequence)
        num_full = swapped_kv.num_tokens // self.shape.block_size
        self._extend_hashes(sequence, num_full)
        hashes = sequence.block_hashes[:num_full]
        found = self.device.index.match(hashes, sequence.tokens, first=len(swapped_kv.kept_block_ids))
        self.device.pool.share(found)
        sequence.block_ids = swapped_kv.kept_block_ids + found
        sequence.num_published = min(len(sequence.block_ids), num_full)
        sequence.num_stored = swapped_kv.num_stored
        if len(found) < len(swapped_kv.host_ids):
            self._swap_in_blocks(sequence, swapped_kv.host_ids[len(found) :])
        self.host.release(swapped_kv.host_ids)
        sequence.swapped_kv = None
        self._enter(sequence, swapped_kv.num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence run that begins as `parent` does, all of whose tokens are computed; there is room for a
        block. Full blocks are shared, the last one is copied if it is not full.
        """
        num_full, rest = divmod(parent.num_committed, self.shape.block_size)
        child.block_ids = parent.block_ids[:num_full]
        self.device.pool.share(child.block_ids)
        child.num_published = min(parent.num_published, num_full)
        child.block_hashes = parent.block_hashes[:num_full]
        if rest:
            self._copy(parent.block_ids[num_full], child)
        child.num_stored = parent.num_committed
        self._enter(child, child.num_stored)

    def rename(self, sequence: Sequence, sequence_id: int) -> None:
        """Give a running sequence that no step names another id: to the worker it is another one, with other tokens."""
        self._send_finished(sequence)
        sequence.num_sent_blocks = None
        sequence.id = sequence_id

    def _send_finished(self, sequence: Sequence) -> None:
        """The next step tells the worker to forget a sequence, if it knows it."""
        if sequence.num_sent_blocks is not None:
            self.finished_ids.append(sequence.id)
            self._block_table_updates = [
                change for change in self._block_table_updates if change.sequence_id != sequence.id
            ]

    def _swap_in_blocks(self, sequence: Sequence, host_ids: list[int]) -> None:
        """Add blocks to a table that are moved in from the host."""
        num_before = len(sequence.block_ids)
        self.allocate(sequence, len(host_ids))
        device_ids = sequence.block_ids[num_before:]
        pairs = [BlockPair(device, host) for device, host in zip(device_ids, host_ids, strict=True)]
        move = Swap(pairs, sequence, [None] * len(pairs))
        self.swaps.add(Direction.IN, move)
        self._swapping_in[sequence.id] = move

    def _copy(self, source: int, sequence: Sequence) -> None:
        """Add a block to a table that begins as a copy of another one."""
        self.device.pool.share([source])  # the next step's, which carries the copy
        self.allocate(sequence, 1)
        self._copies.append(BlockCopy(source, sequence.block_ids[-1]))

    def _enter(self, sequence: Sequence, num_stored: int) -> None:
        sequence.num_computed = sequence.num_committed = min(num_stored, len(sequence.tokens) - 1)
        sequence.num_steps = 0
        sequence.num_sent_blocks = None
        sequence.set_phase(Phase.SWAPPING_IN if sequence.id in self._swapping_in else Phase.RUNNING)
        insort(self.running, sequence, key=lambda s: s.order)

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Add new blocks at the end of a sequence's table. There must be as many available."""
        block_ids = self.device.allocate(count)
        assert block_ids is not None, "allocate without room"
        sequence.block_ids += block_ids

    # Sequences go.

    def leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a running sequence off the replica, to the given phase; its blocks wait for the steps in flight."""
        self.running.remove(sequence)
        self._send_finished(sequence)
        self._swapping_in.pop(sequence.id, None)
        self._cancel_copies(sequence)
        for block in range(sequence.num_published, len(sequence.block_hashes)):
            self._forget_computing(sequence, block)
        sequence.set_phase(phase)
        self.pending_free[sequence.id] = sequence
        self.free_if_idle(sequence)

    def _cancel_copies(self, sequence: Sequence) -> None:
        """Copies that no step carries yet are not made for one who leaves."""
        cancelled = [copy for copy in self._copies if copy.destination in sequence.block_ids]
        if cancelled:
            self._copies = [copy for copy in self._copies if copy not in cancelled]
            self.device.release([copy.source for copy in cancelled])

    def free_if_idle(self, sequence: Sequence) -> bool:
        """Release the blocks of a leaving sequence once no step in flight names them. Returns whether that is done."""
        if sequence.num_in_flight or sequence.id not in self.pending_free:
            return False
        del self.pending_free[sequence.id]
        self.device.release(sequence.block_ids)
        if sequence.swapped_kv is not None:  # how many tokens its last steps returned is known now
            sequence.swapped_kv.num_tokens = sequence.num_committed
            sequence.swapped_kv.num_stored = max(sequence.num_stored, sequence.num_committed)
        sequence.forget_blocks()
        return True

    def unshared_tail(self, sequence: Sequence) -> list[int]:
        """The blocks at the end of a running sequence's table that are its own, and that a swap has to move."""
        first = 0
        for block_id in sequence.block_ids:
            if self.device.pool.num_owners(block_id) == 1:
                break
            first += 1
        return sequence.block_ids[first:]

    def swap_out(self, sequence: Sequence) -> bool:
        """Make the image of a running sequence that is about to leave; False where the host has no room for it.

        What it shares it keeps. Steps in flight write the last tokens of its image, before the copy reads them.
        """
        tail = self.unshared_tail(sequence)
        if any(copy.destination in tail for copy in self._copies):
            return False  # its last block is not there yet
        first = len(sequence.block_ids) - len(tail)
        num_stored = max(sequence.num_stored, sequence.num_computed + sequence.num_extra)
        del tail[max(0, self.num_blocks_for(num_stored) - first) :]
        contents = [self._content(sequence, first + place) for place in range(len(tail))]
        backups = [None if content is None else self.host.index.find(content) for content in contents]
        found = [host_id for host_id in backups if host_id is not None]
        self.host.pool.share(found)
        new = self.host.allocate(len(tail) - len(found))
        if new is None:
            self.host.release(found)
            return False
        fresh = iter(new)
        host_ids = [next(fresh) if host_id is None else host_id for host_id in backups]
        swapped_kv = SwappedKV(
            sequence.block_ids[:first], host_ids, sequence.num_computed, num_stored, num_swapping=len(new)
        )
        sequence.swapped_kv = swapped_kv
        sequence.block_ids = sequence.block_ids[first:]
        places = [place for place, host_id in enumerate(backups) if host_id is None]
        if places:
            pairs = [BlockPair(tail[place], host_ids[place]) for place in places]
            self.swaps.add(Direction.OUT, Swap(pairs, swapped_kv, [contents[place] for place in places]))
        return True

    def keep_swapped(self, sequence: Sequence) -> None:
        """A preempted sequence with an image waits here."""
        sequence.set_phase(Phase.SWAPPED)
        insort(self.swapped, sequence, key=lambda s: s.order)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give up what a swapped sequence holds."""
        swapped_kv = sequence.swapped_kv
        assert swapped_kv is not None
        sequence.swapped_kv = None
        if sequence.id in self.pending_free:  # steps in flight name what it kept, too
            sequence.block_ids = swapped_kv.kept_block_ids + sequence.block_ids
        else:
            self.device.release(swapped_kv.kept_block_ids)
        self.host.release(swapped_kv.host_ids)
        if sequence.phase is Phase.SWAPPED:
            self.swapped.remove(sequence)

    # Steps.

    def start_step(self, plan: StepPlan) -> None:
        """Put a step in flight, with all copies that wait."""
        plan.swap_out.extend(self.swaps.send(plan.step_id, Direction.OUT))
        plan.swap_in.extend(self.swaps.send(plan.step_id, Direction.IN))
        plan.copies.extend(self._copies)
        plan.held_block_ids.extend(copy.source for copy in self._copies)
        plan.block_table_updates.extend(self._block_table_updates)
        plan.block_hashes.extend(self.device.take_new_hashes())
        plan.host_block_hashes.extend(self.host.take_new_hashes())
        self._copies.clear()
        self._block_table_updates.clear()
        self.finished_ids = []
        self.in_flight.append(plan)

    def finish_step(self) -> StepPlan:
        """The oldest step in flight is done; what only it held is let go."""
        plan = self.in_flight.pop(0)
        self.device.release(plan.held_block_ids)
        return plan

    def finish_swap(self, done: SwapDone) -> list[Sequence]:
        """A transfer is over. Returns the sequences that must be computed again because it failed."""
        moves = self.swaps.finish(done.step_id, done.direction)
        if done.failure is None:
            self.costs.observe_swap(sum(len(move.pairs) for move in moves), done.direction, done.seconds)
        lost: list[Sequence] = []
        for move in moves:
            if done.direction is Direction.OUT:
                lost += self._finish_out(move, done.failure is not None)
            elif done.failure is not None:
                # It must not be found there again.
                self.host.index.forget([pair.host for pair in move.pairs if pair.host in self.host.index])
            self.swaps.unpin(done.direction, move)
            if done.direction is Direction.IN and isinstance(move.purpose, Sequence):
                lost += self._finish_in(move, move.purpose, done.failure is not None)
        return lost

    def _finish_out(self, move: Swap, failed: bool) -> list[Sequence]:
        if not failed:
            for pair, content in zip(move.pairs, move.contents, strict=True):
                if content is not None:
                    self.host.publish(pair.host, content)
                    if self.device.pool.was_found_again(pair.device):
                        self.host.pool.mark_found_again(pair.host)
        if not isinstance(move.purpose, SwappedKV):
            return []
        move.purpose.num_swapping -= len(move.pairs)
        holders = [s for s in (*self.swapped, *self.pending_free.values()) if s.swapped_kv is move.purpose]
        if not failed:
            return []
        for sequence in holders:
            self.drop_swapped(sequence)
        return [s for s in holders if s.phase is Phase.SWAPPED]

    def _finish_in(self, move: Swap, sequence: Sequence, failed: bool) -> list[Sequence]:
        if self._swapping_in.get(sequence.id) is not move:
            return []  # it left in the meantime
        del self._swapping_in[sequence.id]
        if failed:
            return [sequence]
        sequence.set_phase(Phase.RUNNING)
        return []

    def back_up(self) -> None:
        """Have cached blocks that would be given up next copied to the host, as far as there is room."""
        # No more than a part of the host, or they would push each other out.
        room = min(_BACKUPS_PER_STEP, self.shape.num_host_blocks // 4, self.host.pool.num_available)
        oldest = [
            (block_id, self.device.index.content(block_id))
            for block_id in islice(self.device.pool.eviction_order, room)
        ]
        wanted = [(block_id, content) for block_id, content in oldest if self.host.index.find(content) is None]
        wanted.reverse()  # as in a sequence: the head first
        host_ids = self.host.allocate(len(wanted)) or []
        if host_ids:
            pairs = [BlockPair(block_id, host_id) for (block_id, _), host_id in zip(wanted, host_ids, strict=True)]
            self.swaps.add(Direction.OUT, Swap(pairs, None, [content for _, content in wanted]))
            self.host.release(host_ids)  # they are the move's alone

    # The prefix index.

    def publish(self, sequence: Sequence) -> None:
        """Tell the index of a sequence's blocks that its committed steps have filled.

        Where another block holds the same already, the sequence shares that one from now on.
        """
        num_full = sequence.num_committed // self.shape.block_size
        if num_full <= sequence.num_published:
            return
        self._extend_hashes(sequence, num_full)
        for block in range(sequence.num_published, num_full):
            self._forget_computing(sequence, block)
            own = sequence.block_ids[block]
            known = self.device.publish(own, self._full_content(sequence, block))
            if known != own:
                self._merge(sequence, block, own, known)
        sequence.num_published = num_full

    def _merge(self, sequence: Sequence, block: int, own: int, known: int) -> None:
        if self.device.index.content(known).tokens != pack_block(sequence.tokens, block, self.shape.block_size):
            return  # the same hash of other tokens
        self.device.pool.share([known])
        sequence.block_ids[block] = known
        if sequence.num_sent_blocks is not None:
            self._block_table_updates.append(BlockTableUpdate(sequence.id, block, known))
        if self.in_flight:
            self.in_flight[-1].held_block_ids.append(own)  # steps that are on their way name it
        else:
            self.device.release([own])

    def _content(self, sequence: Sequence, block: int) -> BlockContent | None:
        """What a block of a sequence holds, if its committed tokens fill it."""
        if (block + 1) * self.shape.block_size > min(sequence.num_committed, len(sequence.tokens)):
            return None
        self._extend_hashes(sequence, block + 1)
        return self._full_content(sequence, block)

    def _full_content(self, sequence: Sequence, block: int) -> BlockContent:
        return BlockContent(sequence.block_hashes[block], pack_block(sequence.tokens, block, self.shape.block_size))

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > len(sequence.block_hashes):
            root = root_hash(self.shape.fingerprint, sequence.request.salt)
            extend_hashes(sequence.block_hashes, root, sequence.tokens, self.shape.block_size, num_blocks)

    def _forget_computing(self, sequence: Sequence, block: int) -> None:
        block_hash = sequence.block_hashes[block]
        if self._computing.get(block_hash) is sequence:
            del self._computing[block_hash]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance: every block in one state, owned by those who list it."""
        owners = [*self.running, *self.pending_free.values()]
        swapped_kvs = [s.swapped_kv for s in (*self.swapped, *self.pending_free.values()) if s.swapped_kv is not None]
        device = Counter(block_id for s in owners for block_id in s.block_ids)
        device.update(block_id for swapped_kv in swapped_kvs for block_id in swapped_kv.kept_block_ids)
        device.update(block_id for plan in self.in_flight for block_id in plan.held_block_ids)
        device.update(copy.source for copy in self._copies)
        host = Counter(block_id for swapped_kv in swapped_kvs for block_id in swapped_kv.host_ids)
        device_pins, host_pins = self.swaps.pins()
        self.device.check_integrity(device, device_pins)
        self.host.check_integrity(host, host_pins)
        for sequence in self.running:
            assert sequence.phase is (Phase.SWAPPING_IN if sequence.id in self._swapping_in else Phase.RUNNING)
            assert sequence.num_committed <= sequence.num_computed <= sequence.num_known
            assert len(sequence.block_ids) >= self.num_blocks_for(sequence.num_computed + sequence.num_extra)
            in_flight_extra = sum(
                part.max_extra_tokens for plan in self.in_flight for part in plan.scheduled if part.sequence is sequence
            )
            assert sequence.num_extra == in_flight_extra, "extra tokens in flight do not add up"
        assert all(s.phase is Phase.SWAPPED and s.swapped_kv is not None for s in self.swapped)
        in_flight = Counter(part.sequence.id for plan in self.in_flight for part in plan.scheduled)
        assert all(in_flight[s.id] == s.num_in_flight for s in owners), "steps in flight do not add up"
        assert self.running == sorted(self.running, key=lambda s: s.order)
        present = {s.id for s in self.running}
        assert all(s.id in present for s in self._computing.values()), "a block is awaited of one who left"
