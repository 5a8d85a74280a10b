"""A replica: one worker's two tiers of blocks, the copies between them, and the sequences that live there."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.inventory import Chain, Inventory, Recognition
from scheduler_svc.core.plan import BlockCopy, BlockPair, Direction, StepPlan, TableChange, TransferDone
from scheduler_svc.core.prefix import Content, extend_hashes, pack_block, root_hash
from scheduler_svc.core.sequence import Image, Phase, Sequence
from scheduler_svc.core.tier import Tier
from scheduler_svc.core.transfers import Move, Transfers

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

    Owners of device blocks are the sequences in `running`; those in `leaving`, which have ended or were preempted while
    a step in flight still names them; the images of those in `swapped` and `leaving`; and the steps in flight, by
    `StepPlan.held_ids`. Owners of host blocks are images.
    """

    def __init__(self, shape: ReplicaShape, name: str = "") -> None:
        """`name` is the worker's, for the operator."""
        self.shape = shape
        self.name = name
        self.device = Tier(shape.num_blocks, shape.block_size)
        self.host = Tier(shape.num_host_blocks, shape.block_size)
        self.transfers = Transfers(self.device, self.host)
        self.costs = CostModel(shape.block_bytes, shape.swap_bytes_per_second, shape.prefill_tokens_per_second)
        self.running: list[Sequence] = []  # by order
        self.swapped: list[Sequence] = []  # by order
        self.leaving: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.num_steps = 0
        self.is_retired = False  # it is given no more than it has
        # For the next step to tell the worker.
        self.departed_ids: list[int] = []
        self._copies: list[BlockCopy] = []
        self._table_changes: list[TableChange] = []
        self._arriving: dict[int, Move] = {}  # by sequence id, what it waits for
        self._pending: dict[bytes, Sequence] = {}  # by hash, who is about to compute a block

    def adopt(self, inventory: Inventory, chains: Iterable[Chain]) -> int:
        """Have blocks found again that the worker kept, of those whose label is recomputed from a chain; how many.

        Labels that no chain leads to are ignored, with all that comes behind a block that is in neither tier, and so
        are blocks that are not there. Before the first step only.
        """
        assert not self.num_steps, "a replica that is at work adopts no blocks"
        if not inventory.device and not inventory.host:
            return 0
        sizes = self.shape.num_blocks, self.shape.num_host_blocks
        recognition = Recognition(inventory, self.shape.fingerprint, self.shape.block_size, sizes)
        for chain in chains:
            recognition.follow(chain)
        self.device.adopt(recognition.device)
        self.host.adopt(recognition.host)
        return len(recognition.device) + len(recognition.host)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is here, nor a step in flight."""
        return not (self.running or self.swapped or self.leaving or self.in_flight)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.shape.block_size)

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence has no place in its blocks."""
        return len(sequence.block_ids) * self.shape.block_size <= sequence.num_computed

    @property
    def num_due(self) -> int:
        """Blocks that will be available once the steps and copies under way are done."""
        pool = self.device.pool
        ends = Counter(block_id for s in self.leaving.values() for block_id in s.block_ids)
        ends.update(block_id for plan in self.in_flight for block_id in plan.held_ids)
        pins, _ = self.transfers.pins()
        return sum(pool.num_owners(block_id) == ends[block_id] for block_id in ends.keys() | pins.keys())

    @property
    def is_short_of_free_blocks(self) -> bool:
        """Whether cached blocks will soon be given up."""
        return self.device.pool.num_free * 8 < self.shape.num_blocks

    @property
    def has_news(self) -> bool:
        """Whether the worker has something to do or to hear of beside computing."""
        return bool(self.departed_ids) or self.transfers.has_waiting

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
        leader = self._pending.get(hashes[end]) if end < len(hashes) else None
        if leader is None:
            return None
        while end < len(hashes) and self._pending.get(hashes[end]) is leader:
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
            self._bring(sequence, hit.host_ids)
        if hit.partial_id is not None:
            self._copy(hit.partial_id, sequence)
            sequence.num_stored = len(sequence.tokens)
        self._enter(sequence, sequence.num_stored)
        for block in range(hit.num_full, len(sequence.block_hashes)):
            self._pending.setdefault(sequence.block_hashes[block], sequence)

    def num_needed_to_resume(self, sequence: Sequence) -> int:
        """Blocks that must be available for a swapped sequence to come back."""
        assert sequence.image is not None
        return self.num_blocks_for(len(sequence.tokens)) - len(sequence.image.kept_ids)

    def resume(self, sequence: Sequence) -> None:
        """Let a swapped sequence run again; there is room. What can still be found on the device is not moved."""
        image = sequence.image
        assert image is not None
        assert not image.num_moving
        self.swapped.remove(sequence)
        num_full = image.num_tokens // self.shape.block_size
        self._extend_hashes(sequence, num_full)
        hashes = sequence.block_hashes[:num_full]
        found = self.device.index.match(hashes, sequence.tokens, first=len(image.kept_ids))
        self.device.pool.share(found)
        sequence.block_ids = image.kept_ids + found
        sequence.num_published = min(len(sequence.block_ids), num_full)
        sequence.num_stored = image.num_stored
        if len(found) < len(image.host_ids):
            self._bring(sequence, image.host_ids[len(found) :])
        self.host.release(image.host_ids)
        sequence.image = None
        self._enter(sequence, image.num_tokens)

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
        self._have_forgotten(sequence)
        sequence.num_told = None
        sequence.id = sequence_id

    def _have_forgotten(self, sequence: Sequence) -> None:
        """The next step tells the worker to forget a sequence, if it knows it."""
        if sequence.num_told is not None:
            self.departed_ids.append(sequence.id)
            self._table_changes = [change for change in self._table_changes if change.sequence_id != sequence.id]

    def _bring(self, sequence: Sequence, host_ids: list[int]) -> None:
        """Add blocks to a table that are moved in from the host."""
        num_before = len(sequence.block_ids)
        self.allocate(sequence, len(host_ids))
        device_ids = sequence.block_ids[num_before:]
        pairs = [BlockPair(device, host) for device, host in zip(device_ids, host_ids, strict=True)]
        move = Move(pairs, sequence, [None] * len(pairs))
        self.transfers.add(Direction.IN, move)
        self._arriving[sequence.id] = move

    def _copy(self, source: int, sequence: Sequence) -> None:
        """Add a block to a table that begins as a copy of another one."""
        self.device.pool.share([source])  # the next step's, which carries the copy
        self.allocate(sequence, 1)
        self._copies.append(BlockCopy(source, sequence.block_ids[-1]))

    def _enter(self, sequence: Sequence, num_stored: int) -> None:
        sequence.num_computed = sequence.num_committed = min(num_stored, len(sequence.tokens) - 1)
        sequence.num_steps = 0
        sequence.num_told = None
        sequence.move(Phase.ARRIVING if sequence.id in self._arriving else Phase.RUNNING)
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
        self._have_forgotten(sequence)
        self._arriving.pop(sequence.id, None)
        self._cancel_copies(sequence)
        for block in range(sequence.num_published, len(sequence.block_hashes)):
            self._forget_pending(sequence, block)
        sequence.move(phase)
        self.leaving[sequence.id] = sequence
        self.settle(sequence)

    def _cancel_copies(self, sequence: Sequence) -> None:
        """Copies that no step carries yet are not made for one who leaves."""
        cancelled = [copy for copy in self._copies if copy.destination in sequence.block_ids]
        if cancelled:
            self._copies = [copy for copy in self._copies if copy not in cancelled]
            self.device.release([copy.source for copy in cancelled])

    def settle(self, sequence: Sequence) -> bool:
        """Release the blocks of a leaving sequence once no step in flight names them. Returns whether that is done."""
        if sequence.num_in_flight or sequence.id not in self.leaving:
            return False
        del self.leaving[sequence.id]
        self.device.release(sequence.block_ids)
        sequence.forget_blocks()
        return True

    def tail_of(self, sequence: Sequence) -> list[int]:
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
        tail = self.tail_of(sequence)
        if any(copy.destination in tail for copy in self._copies):
            return False  # its last block is not there yet
        first = len(sequence.block_ids) - len(tail)
        num_stored = max(sequence.num_stored, sequence.num_computed)
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
        image = Image(sequence.block_ids[:first], host_ids, sequence.num_computed, num_stored, num_moving=len(new))
        sequence.image = image
        sequence.block_ids = sequence.block_ids[first:]
        places = [place for place, host_id in enumerate(backups) if host_id is None]
        if places:
            pairs = [BlockPair(tail[place], host_ids[place]) for place in places]
            self.transfers.add(Direction.OUT, Move(pairs, image, [contents[place] for place in places]))
        return True

    def keep_image(self, sequence: Sequence) -> None:
        """A preempted sequence with an image waits here."""
        sequence.move(Phase.SWAPPED)
        insort(self.swapped, sequence, key=lambda s: s.order)

    def drop_image(self, sequence: Sequence) -> None:
        """Give up what a swapped sequence holds."""
        image = sequence.image
        assert image is not None
        sequence.image = None
        if sequence.id in self.leaving:  # steps in flight name what it kept, too
            sequence.block_ids = image.kept_ids + sequence.block_ids
        else:
            self.device.release(image.kept_ids)
        self.host.release(image.host_ids)
        if sequence.phase is Phase.SWAPPED:
            self.swapped.remove(sequence)

    # Steps.

    def send(self, plan: StepPlan) -> None:
        """Put a step in flight, with all copies that wait."""
        plan.swap_out.extend(self.transfers.send(plan.step_id, Direction.OUT))
        plan.swap_in.extend(self.transfers.send(plan.step_id, Direction.IN))
        plan.copies.extend(self._copies)
        plan.held_ids.extend(copy.source for copy in self._copies)
        plan.table_changes.extend(self._table_changes)
        plan.labels.extend(self.device.take_labels())
        plan.host_labels.extend(self.host.take_labels())
        self._copies.clear()
        self._table_changes.clear()
        self.departed_ids = []
        self.in_flight.append(plan)

    def take(self) -> StepPlan:
        """The oldest step in flight is done; what only it held is let go."""
        plan = self.in_flight.pop(0)
        self.device.release(plan.held_ids)
        return plan

    def finish_transfer(self, done: TransferDone) -> list[Sequence]:
        """A transfer is over. Returns the sequences that must be computed again because it failed."""
        moves = self.transfers.finish(done.step_id, done.direction)
        if done.failure is None:
            self.costs.observe_transfer(sum(len(move.pairs) for move in moves), done.direction, done.seconds)
        lost: list[Sequence] = []
        for move in moves:
            if done.direction is Direction.OUT:
                lost += self._finish_out(move, done.failure is not None)
            elif done.failure is not None:
                # It must not be found there again.
                self.host.index.forget([pair.host for pair in move.pairs if pair.host in self.host.index])
            self.transfers.unpin(done.direction, move)
            if done.direction is Direction.IN and isinstance(move.purpose, Sequence):
                lost += self._finish_in(move, move.purpose, done.failure is not None)
        return lost

    def _finish_out(self, move: Move, failed: bool) -> list[Sequence]:
        if not failed:
            for pair, content in zip(move.pairs, move.contents, strict=True):
                if content is not None:
                    self.host.publish(pair.host, content)
                    if self.device.pool.was_found_again(pair.device):
                        self.host.pool.mark_found_again(pair.host)
        if not isinstance(move.purpose, Image):
            return []
        move.purpose.num_moving -= len(move.pairs)
        holders = [s for s in (*self.swapped, *self.leaving.values()) if s.image is move.purpose]
        if not failed:
            return []
        for sequence in holders:
            self.drop_image(sequence)
        return [s for s in holders if s.phase is Phase.SWAPPED]

    def _finish_in(self, move: Move, sequence: Sequence, failed: bool) -> list[Sequence]:
        if self._arriving.get(sequence.id) is not move:
            return []  # it left in the meantime
        del self._arriving[sequence.id]
        if failed:
            return [sequence]
        sequence.move(Phase.RUNNING)
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
            self.transfers.add(Direction.OUT, Move(pairs, None, [content for _, content in wanted]))
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
            self._forget_pending(sequence, block)
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
        if sequence.num_told is not None:
            self._table_changes.append(TableChange(sequence.id, block, known))
        if self.in_flight:
            self.in_flight[-1].held_ids.append(own)  # steps that are on their way name it
        else:
            self.device.release([own])

    def _content(self, sequence: Sequence, block: int) -> Content | None:
        """What a block of a sequence holds, if its committed tokens fill it."""
        if (block + 1) * self.shape.block_size > min(sequence.num_committed, len(sequence.tokens)):
            return None
        self._extend_hashes(sequence, block + 1)
        return self._full_content(sequence, block)

    def _full_content(self, sequence: Sequence, block: int) -> Content:
        return Content(sequence.block_hashes[block], pack_block(sequence.tokens, block, self.shape.block_size))

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > len(sequence.block_hashes):
            root = root_hash(self.shape.fingerprint, sequence.request.salt)
            extend_hashes(sequence.block_hashes, root, sequence.tokens, self.shape.block_size, num_blocks)

    def _forget_pending(self, sequence: Sequence, block: int) -> None:
        block_hash = sequence.block_hashes[block]
        if self._pending.get(block_hash) is sequence:
            del self._pending[block_hash]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance: every block in one state, owned by those who list it."""
        owners = [*self.running, *self.leaving.values()]
        images = [s.image for s in (*self.swapped, *self.leaving.values()) if s.image is not None]
        device = Counter(block_id for s in owners for block_id in s.block_ids)
        device.update(block_id for image in images for block_id in image.kept_ids)
        device.update(block_id for plan in self.in_flight for block_id in plan.held_ids)
        device.update(copy.source for copy in self._copies)
        host = Counter(block_id for image in images for block_id in image.host_ids)
        device_pins, host_pins = self.transfers.pins()
        self.device.check_integrity(device, device_pins)
        self.host.check_integrity(host, host_pins)
        for sequence in self.running:
            assert sequence.phase is (Phase.ARRIVING if sequence.id in self._arriving else Phase.RUNNING)
            assert sequence.num_committed <= sequence.num_computed <= sequence.num_known
            assert len(sequence.block_ids) >= self.num_blocks_for(sequence.num_computed)
        assert all(s.phase is Phase.SWAPPED and s.image is not None for s in self.swapped)
        in_flight = Counter(part.sequence.id for plan in self.in_flight for part in plan.scheduled)
        assert all(in_flight[s.id] == s.num_in_flight for s in owners), "steps in flight do not add up"
        assert self.running == sorted(self.running, key=lambda s: s.order)
        present = {s.id for s in self.running}
        assert all(s.id in present for s in self._pending.values()), "a block is awaited of one who left"
