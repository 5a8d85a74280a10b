"""KV memory of one replica: blocks on the device and on its host, the prefix cache over both, copies between them."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.kv.block_hash_report import BlockHashMatcher, BlockHashReport, TokenChain
from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.prefix_cache import Hit, PrefixCache
from scheduler_svc.core.kv.prefix_index import pack_block
from scheduler_svc.core.kv.swap import Swap, SwapManager
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Phase, Sequence, SwappedKV
from scheduler_svc.core.step import BlockCopy, BlockPair, BlockTableUpdate, Direction, StepPlan, SwapDone

_BACKUPS_PER_STEP = 16  # cached blocks, those that would be evicted first, that a step may copy to the host


class SwapResult(NamedTuple):
    """Sequences whose swap-in is done, and sequences that lost their KV since a copy failed."""

    arrived: list[Sequence]
    lost: list[Sequence]


class KVManager:
    """One replica's KV memory: its methods, and `cache_reset`, allocate and free all blocks, hence their number.

    Owners of device blocks: block tables (`Sequence.block_ids`), `SwappedKV.kept_block_ids`, steps in flight
    (`StepPlan.held_block_ids`) and copies that the next step will carry. Owners of host blocks: `SwappedKV.host_ids`.
    Swaps pin blocks on both tiers.
    """

    def __init__(self, shape: ReplicaShape, costs: CostModel, device: BlockTier, host: BlockTier) -> None:
        self.device = device
        self.host = host
        self.swaps = SwapManager(device, host)
        self._prefixes = PrefixCache(shape, costs, device, host)
        self._shape = shape
        self._costs = costs
        self._copies: list[BlockCopy] = []  # that the next step will carry
        self._block_table_updates: list[BlockTableUpdate] = []  # likewise
        self._swapping_in: dict[int, Swap] = {}  # by sequence id

    def restore_cached_blocks(self, hash_report: BlockHashReport, chains: Iterable[TokenChain]) -> int:
        """Puts blocks that the worker still holds into the prefix cache; returns how many. Before the first step only.

        A block is known by its hash, recomputed from the token chains. Blocks after a missing one are ignored.
        """
        if not hash_report.device and not hash_report.host:
            return 0
        sizes = self._shape.num_blocks, self._shape.num_host_blocks
        matcher = BlockHashMatcher(hash_report, self._shape.fingerprint, self._shape.block_size, sizes)
        for chain in chains:
            matcher.match(chain)
        self.device.restore_cached_blocks(matcher.device)
        self.host.restore_cached_blocks(matcher.host)
        return len(matcher.device) + len(matcher.host)

    # How many blocks.

    @property
    def num_available(self) -> int:
        """Device blocks that can be allocated: free and cached ones."""
        return self.device.pool.num_available

    @property
    def is_short_of_free_blocks(self) -> bool:
        """Whether cached blocks will soon be evicted."""
        return self.device.pool.num_free * 8 < self._shape.num_blocks

    def num_pending_free(self, tables: Iterable[list[int]]) -> int:
        """Blocks that will be available once these tables are released and the copies in progress are done."""
        releases = Counter(block_id for table in tables for block_id in table)
        pins, _ = self.swaps.pins()
        num_owners = self.device.pool.num_owners
        return sum(num_owners(block_id) == releases[block_id] for block_id in releases.keys() | pins.keys())

    def num_freed(self, tables: Collection[list[int]]) -> int:
        """Blocks that would be available if these tables were released: those without another owner."""
        releases = Counter(block_id for table in tables for block_id in table)
        return sum(self.device.pool.num_owners(block_id) == count for block_id, count in releases.items())

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before a sequence computes more tokens, whatever its steps in flight return."""
        end = sequence.num_computed + sequence.num_extra + num_tokens
        return -(-end // self._shape.block_size) - len(sequence.block_ids)

    def num_needed(self, sequence: Sequence, hit: Hit) -> int:
        """Device blocks that must be available to admit a sequence with all its known tokens, or a whole search."""
        if self._shape.is_without_kv(sequence.request):
            return 0
        num_revived = sum(self.device.pool.is_cached(block_id) for block_id in hit.device_ids)
        num_new = self._shape.num_blocks_for(len(sequence.tokens)) - len(hit.device_ids)
        return num_new + num_revived + sequence.num_fork_blocks(self._shape.block_size)

    def num_needed_to_swap_in(self, sequence: Sequence) -> int:
        """Device blocks that must be available to swap a sequence in."""
        swapped_kv = sequence.swapped_kv
        assert swapped_kv is not None
        # Blocks for tokens that were speculated and rejected are swapped in with the others.
        num_kept = len(swapped_kv.kept_block_ids)
        return max(self._shape.num_blocks_for(len(sequence.tokens)) - num_kept, len(swapped_kv.host_ids))

    def unshared_tail(self, sequence: Sequence) -> list[int]:
        """The blocks at the end of a sequence's table that it alone owns: those that a swap copies."""
        first = 0
        for block_id in sequence.block_ids:
            if self.device.pool.num_owners(block_id) == 1:
                break
            first += 1
        return sequence.block_ids[first:]

    # Tables of sequences.

    def match(self, sequence: Sequence) -> Hit:
        """What the prefix cache holds of a sequence."""
        return self._prefixes.match(sequence)

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """About how many leading blocks of a sequence the prefix cache holds."""
        return self._prefixes.num_cached_blocks(sequence)

    def reuse(self, sequence: Sequence, hit: Hit) -> None:
        """Starts a sequence's table with the blocks of a hit. There is room."""
        self.device.pool.share(hit.device_ids)
        sequence.block_ids = list(hit.device_ids)
        sequence.num_published = len(hit.device_ids)
        sequence.num_cached_tokens = hit.num_full * self._shape.block_size
        if hit.host_ids:
            self._swap_in_blocks(sequence, hit.host_ids)
        if hit.partial_id is not None:
            self._copy(hit.partial_id, sequence)
            sequence.num_cached_tokens = len(sequence.tokens)
        self._prefixes.start_computing(sequence, hit)

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Appends new blocks to a sequence's table. There is room."""
        block_ids = self.device.allocate(count)
        assert block_ids is not None, "allocate without room"
        sequence.block_ids += block_ids

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Starts a table with `parent`'s first `num_tokens` tokens, which are computed. There is room for one block.

        Full blocks are shared; the last block is copied unless it is full.
        """
        num_full, rest = divmod(num_tokens, self._shape.block_size)
        child.block_ids = parent.block_ids[:num_full]
        self.device.pool.share(child.block_ids)
        child.num_published = min(parent.num_published, num_full)
        child.block_hashes = parent.block_hashes[:num_full]
        if rest:
            self._copy(parent.block_ids[num_full], child)
        child.num_cached_tokens = num_tokens

    def detach(self, sequence: Sequence, steps_in_flight: Iterable[StepPlan]) -> None:
        """A sequence leaves: cancel what the next step would do to its table.

        A copy from the host that is in progress continues, and its result is ignored. A copy of a block that a step in
        flight makes continues, too; the step holds the block that it writes.
        """
        self._swapping_in.pop(sequence.id, None)
        self.cancel_table_updates(sequence)
        cancelled = [copy for copy in self._copies if copy.destination in sequence.block_ids]
        if cancelled:
            self._copies = [copy for copy in self._copies if copy not in cancelled]
            self.device.release([copy.source for copy in cancelled])
        kept_block_ids = sequence.swapped_kv.kept_block_ids if sequence.swapped_kv is not None else []
        for plan in steps_in_flight:
            held = [
                copy.destination
                for copy in plan.copies
                if copy.destination in sequence.block_ids or copy.destination in kept_block_ids
            ]
            self.device.pool.share(held)
            plan.held_block_ids.extend(held)
        self._prefixes.stop_computing(sequence, range(sequence.num_published, len(sequence.block_hashes)))

    def cancel_table_updates(self, sequence: Sequence) -> None:
        """The worker forgets this sequence id with the next step: no update of its table is sent."""
        if self._block_table_updates:
            updates = self._block_table_updates
            self._block_table_updates = [update for update in updates if update.sequence_id != sequence.id]

    def free(self, sequence: Sequence) -> None:
        """Releases a sequence's table, which no step in flight names any more."""
        self.device.release(sequence.block_ids)
        if sequence.swapped_kv is not None:  # how many tokens its last steps returned is known now
            sequence.swapped_kv.num_tokens = sequence.num_committed
            sequence.swapped_kv.num_cached_tokens = max(sequence.num_cached_tokens, sequence.num_committed)
        sequence.forget_blocks()

    def _copy(self, source: int, sequence: Sequence) -> None:
        """Appends a block to a table that the next step makes a copy of another one."""
        self.device.pool.share([source])  # owned by the copy
        self.allocate(sequence, 1)
        self._copies.append(BlockCopy(source, sequence.block_ids[-1]))

    # Swaps.

    def keep(self, sequences: Collection[Sequence]) -> bool:
        """Keeps all blocks of sequences that are about to give up their slots; `swap_in` restores a table.

        False if one of them is still the target of a copy.
        """
        if any(copy.destination in sequence.block_ids for copy in self._copies for sequence in sequences):
            return False
        for sequence in sequences:
            num_computed, num_published = sequence.num_computed, sequence.num_published
            num_cached_tokens = max(sequence.num_cached_tokens, num_computed + sequence.num_extra)
            sequence.swapped_kv = SwappedKV(
                sequence.block_ids, [], num_computed, num_cached_tokens, is_kept=True, num_published=num_published
            )
            sequence.block_ids = []
        return True

    def swap_out(self, sequence: Sequence) -> bool:
        """Swaps out a sequence that is about to leave the device.

        False if the host has no room for it, or a block of it is still the target of a copy. Shared blocks stay on the
        device. Steps in flight write its last tokens before the copy reads them.
        """
        tail = self.unshared_tail(sequence)
        if any(copy.destination in tail for copy in self._copies):
            return False  # its last block is not written yet
        first = len(sequence.block_ids) - len(tail)
        num_cached_tokens = max(sequence.num_cached_tokens, sequence.num_computed + sequence.num_extra)
        del tail[max(0, self._shape.num_blocks_for(num_cached_tokens) - first) :]
        contents = [self._prefixes.content(sequence, first + index) for index in range(len(tail))]
        backups = [None if content is None else self.host.index.find(content) for content in contents]
        found = [host_id for host_id in backups if host_id is not None]
        self.host.pool.share(found)
        new = self.host.allocate(len(tail) - len(found))
        if new is None:
            self.host.release(found)
            return False
        fresh = iter(new)
        host_ids = [next(fresh) if host_id is None else host_id for host_id in backups]
        swapped_kv = SwappedKV(sequence.block_ids[:first], host_ids, sequence.num_computed, num_cached_tokens, len(new))
        sequence.swapped_kv = swapped_kv
        sequence.block_ids = sequence.block_ids[first:]
        indices = [index for index, host_id in enumerate(backups) if host_id is None]
        if indices:
            pairs = [BlockPair(tail[index], host_ids[index]) for index in indices]
            self.swaps.add(
                Direction.OUT, Swap(pairs, [contents[index] for index in indices], sequence, swapped_kv=swapped_kv)
            )
        return True

    def swap_in(self, sequence: Sequence) -> int:
        """Starts the table of a swapped sequence; returns how many tokens it holds. There is room.

        Blocks that the device still caches are not copied.
        """
        swapped_kv = sequence.swapped_kv
        assert swapped_kv is not None
        assert not swapped_kv.num_swapping
        num_full = swapped_kv.num_tokens // self._shape.block_size
        found = self._prefixes.match_cached(sequence, len(swapped_kv.kept_block_ids), num_full)
        self.device.pool.share(found)
        sequence.block_ids = swapped_kv.kept_block_ids + found
        num_published = swapped_kv.num_published if swapped_kv.is_kept else len(sequence.block_ids)
        sequence.num_published = min(num_published, num_full)
        sequence.num_cached_tokens = swapped_kv.num_cached_tokens
        if len(found) < len(swapped_kv.host_ids):
            self._swap_in_blocks(sequence, swapped_kv.host_ids[len(found) :])
        self.host.release(swapped_kv.host_ids)
        sequence.swapped_kv = None
        return swapped_kv.num_tokens

    def is_swapping_in(self, sequence: Sequence) -> bool:
        """Whether blocks of its table are still being copied from the host."""
        return sequence.id in self._swapping_in

    def drop_swapped(self, sequence: Sequence) -> None:
        """Frees the swapped KV of a sequence."""
        swapped_kv = sequence.swapped_kv
        assert swapped_kv is not None
        sequence.swapped_kv = None
        if sequence.num_steps_in_flight:  # steps in flight name the blocks that it kept, too
            sequence.block_ids = swapped_kv.kept_block_ids + sequence.block_ids
        else:
            self.device.release(swapped_kv.kept_block_ids)
        self.host.release(swapped_kv.host_ids)

    def finish_swap(self, done: SwapDone) -> SwapResult:
        """The worker has done a transfer, or it failed."""
        result = SwapResult([], [])
        swaps = self.swaps.finish(done.step_id, done.direction)
        if done.failure is None:
            self._costs.observe_swap(sum(len(swap.pairs) for swap in swaps), done.direction, done.seconds)
        finish = self._finish_out if done.direction is Direction.OUT else self._finish_in
        for swap in swaps:
            finish(swap, done.failure is not None, result)
        return result

    def _finish_out(self, swap: Swap, has_failed: bool, result: SwapResult) -> None:
        if not has_failed:
            for pair, content in zip(swap.pairs, swap.contents, strict=True):
                if content is not None:
                    self.host.publish(pair.host, content)
                    if self.device.pool.was_found_again(pair.device):
                        self.host.pool.mark_found_again(pair.host)
        sequence, swapped_kv = swap.sequence, swap.swapped_kv
        if swapped_kv is not None:
            swapped_kv.num_swapping -= len(swap.pairs)
        if has_failed and sequence is not None and sequence.swapped_kv is swapped_kv:
            self.drop_swapped(sequence)
            result.lost.append(sequence)
        self.swaps.unpin(Direction.OUT, swap)

    def _finish_in(self, swap: Swap, has_failed: bool, result: SwapResult) -> None:
        if has_failed:  # the host blocks must not be found again
            self.host.index.forget([pair.host for pair in swap.pairs if pair.host in self.host.index])
        self.swaps.unpin(Direction.IN, swap)
        sequence = swap.sequence
        if sequence is not None and self._swapping_in.get(sequence.id) is swap:  # else it left in the meantime
            del self._swapping_in[sequence.id]
            (result.lost if has_failed else result.arrived).append(sequence)

    def _swap_in_blocks(self, sequence: Sequence, host_ids: list[int]) -> None:
        """Appends blocks to a table that are copied from the host."""
        num_before = len(sequence.block_ids)
        self.allocate(sequence, len(host_ids))
        device_ids = sequence.block_ids[num_before:]
        pairs = [BlockPair(device, host) for device, host in zip(device_ids, host_ids, strict=True)]
        swap = Swap(pairs, [None] * len(pairs), sequence)
        self.swaps.add(Direction.IN, swap)
        self._swapping_in[sequence.id] = swap

    def back_up(self) -> None:
        """Copies the cached device blocks that would be evicted next to the host, as far as there is room."""
        # At most a part of the host, or backups would evict each other.
        room = min(_BACKUPS_PER_STEP, self._shape.num_host_blocks // 4, self.host.pool.num_available)
        oldest = [
            (block_id, self.device.index.content(block_id))
            for block_id in islice(self.device.pool.eviction_order, room)
        ]
        wanted = [(block_id, content) for block_id, content in oldest if self.host.index.find(content) is None]
        wanted.reverse()  # the head of a sequence first
        host_ids = self.host.allocate(len(wanted)) or []
        if host_ids:
            pairs = [BlockPair(block_id, host_id) for (block_id, _), host_id in zip(wanted, host_ids, strict=True)]
            self.swaps.add(Direction.OUT, Swap(pairs, [content for _, content in wanted]))
            self.host.release(host_ids)  # only the swap's pins hold them

    # Steps.

    def start_step(self, plan: StepPlan) -> None:
        """Has a step carry all that waits for one."""
        plan.swap_out.extend(self.swaps.send(plan.step_id, Direction.OUT))
        plan.swap_in.extend(self.swaps.send(plan.step_id, Direction.IN))
        plan.copies.extend(self._copies)
        plan.held_block_ids.extend(copy.source for copy in self._copies)
        plan.block_table_updates.extend(self._block_table_updates)
        plan.block_hashes.extend(self.device.take_new_hashes())
        plan.host_block_hashes.extend(self.host.take_new_hashes())
        self._copies.clear()
        self._block_table_updates.clear()

    def finish_step(self, plan: StepPlan) -> None:
        """Releases what only this step held."""
        self.device.release(plan.held_block_ids)

    def publish(self, sequence: Sequence, newest: StepPlan | None) -> None:
        """Puts a sequence's blocks that committed steps have filled into the prefix cache.

        If another block holds the same, the sequence shares that one from now on, and its own is released: when
        `newest`, the newest step in flight, is done, since it may name it.
        """
        num_full = sequence.num_committed // self._shape.block_size
        self._prefixes.extend_hashes(sequence, num_full)
        blocks = range(sequence.num_published, num_full)
        self._prefixes.stop_computing(sequence, blocks)
        for block in blocks:
            own = sequence.block_ids[block]
            known = self.device.publish(own, self._prefixes.full_content(sequence, block))
            if known != own:
                self._merge(sequence, block, known, newest)
        sequence.num_published = num_full

    def forget_contents(self, sequence: Sequence) -> None:
        """Removes what is known of a sequence from the prefix cache, on both tiers: blocks may hold wrong values."""
        num_blocks = min(len(sequence.block_hashes), len(sequence.tokens) // self._shape.block_size)
        contents = {self._prefixes.full_content(sequence, block) for block in range(num_blocks)}
        self.device.forget(contents)
        self.host.forget(contents)
        self.swaps.forget(contents)

    def _merge(self, sequence: Sequence, block: int, known: int, newest: StepPlan | None) -> None:
        own = sequence.block_ids[block]
        if self.device.index.content(known).tokens != pack_block(sequence.tokens, block, self._shape.block_size):
            return  # the same hash of other tokens
        self.device.pool.share([known])
        sequence.block_ids[block] = known
        if sequence.num_sent_blocks is not None:
            self._block_table_updates.append(BlockTableUpdate(sequence.id, block, known))
        if newest is not None:
            newest.held_block_ids.append(own)
        else:
            self.device.release([own])

    def check_integrity(
        self, tables: Collection[Sequence], swapped_kvs: Collection[SwappedKV], steps_in_flight: Iterable[StepPlan]
    ) -> None:
        """Raises AssertionError unless every block is in one state and has the owners that list it.

        `tables` are the sequences that own device blocks.
        """
        device = Counter(block_id for sequence in tables for block_id in sequence.block_ids)
        device.update(block_id for swapped_kv in swapped_kvs for block_id in swapped_kv.kept_block_ids)
        device.update(block_id for plan in steps_in_flight for block_id in plan.held_block_ids)
        device.update(copy.source for copy in self._copies)
        host = Counter(block_id for swapped_kv in swapped_kvs for block_id in swapped_kv.host_ids)
        device_pins, host_pins = self.swaps.pins()
        self.device.check_integrity(device, device_pins)
        self.host.check_integrity(host, host_pins)
        at_work = (Phase.RUNNING, Phase.SWAPPING_IN)
        self._prefixes.check_integrity({sequence.id for sequence in tables if sequence.phase in at_work})
