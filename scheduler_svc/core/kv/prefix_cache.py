"""The prefix cache of one replica: what its blocks, on the device and on the host, hold of a sequence."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.computing import ComputingBlocks
from scheduler_svc.core.kv.prefix_index import BlockContent, extend_hashes, pack_block, root_hash
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Sequence


class PendingPrefix(NamedTuple):
    """A prefix that a running sequence, the producer, is about to compute, and its length in tokens."""

    producer: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hit:
    """What the prefix cache holds of a sequence: device blocks, then host blocks.

    `partial_id` is a sibling's block that begins with the rest of the prompt. `pending_prefix` is a longer one
    that another sequence is about to compute. `overtaken` is such a sequence that is not waited for.
    """

    device_ids: list[int]
    host_ids: list[int] = field(default_factory=list)
    partial_id: int | None = None
    pending_prefix: PendingPrefix | None = None
    overtaken: Sequence | None = None

    @property
    def num_full(self) -> int:
        """Full blocks."""
        return len(self.device_ids) + len(self.host_ids)


class PrefixCache:
    """Finds blocks by the hashes of sequences, and sequences that are about to compute such blocks."""

    def __init__(self, shape: ReplicaShape, costs: CostModel, device: BlockTier, host: BlockTier) -> None:
        self._shape = shape
        self._costs = costs
        self._device = device
        self._host = host
        self._computing = ComputingBlocks()

    def match(self, sequence: Sequence) -> Hit:
        """What is cached of a sequence. Host blocks are left out if computing them costs less than copying them in."""
        if self._shape.is_without_kv(sequence.request):
            return Hit([])
        size = self._shape.block_size
        self.extend_hashes(sequence, len(sequence.tokens) // size)
        hashes = self._reusable_hashes(sequence)
        device_ids = self._device.index.match(hashes, sequence.tokens)
        host_ids = self._host.index.match(hashes, sequence.tokens, len(device_ids))
        if host_ids:
            recompute_seconds = self._costs.recompute_seconds(len(host_ids) * size, len(device_ids) * size)
            if recompute_seconds < self._costs.swap_seconds(0, len(host_ids)):
                host_ids = []
        num_found = len(device_ids) + len(host_ids)
        computing = self._computing.find(hashes, num_found)
        if computing is None:
            return Hit(device_ids, host_ids)
        producer, num_blocks = computing
        return Hit(device_ids, host_ids, pending_prefix=PendingPrefix(producer, num_blocks * size))

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """About how many leading blocks are cached, on either tier. Hashes at most twice as many, and one.

        O(log n) look-ups: it takes no notice of blocks that are missing before others which are there.
        """
        shape, request = self._shape, sequence.request
        if shape.is_without_kv(request) or shape.is_indivisible(request) or sequence.needs_prompt_logprobs:
            return 0
        num_full = len(sequence.tokens) // shape.block_size
        num_found, num_tried = 0, 1
        while num_tried <= num_full and self._has(sequence, num_tried - 1):
            num_found, num_tried = num_tried, 2 * num_tried
        left = range(num_found, min(num_tried - 1, num_full))
        return num_found + bisect_left(left, True, key=lambda block: not self._has(sequence, block))

    def _has(self, sequence: Sequence, block: int) -> bool:
        self.extend_hashes(sequence, block + 1)
        block_hash = sequence.block_hashes[block]
        return self._device.index.has(block_hash) or self._host.index.has(block_hash)

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the leading blocks that may come from the cache: not those whose computation returns something."""
        if self._shape.is_indivisible(sequence.request):
            return []
        if sequence.needs_prompt_logprobs:
            return sequence.block_hashes[: sequence.num_prompt_logprobs // self._shape.block_size]
        return sequence.block_hashes

    def start_computing(self, sequence: Sequence, hit: Hit) -> None:
        """A sequence is about to compute its blocks after those of a hit, as far as its tokens are known."""
        self._computing.add(sequence, hit.num_full, hit.overtaken)

    def stop_computing(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """A sequence has computed these of its blocks, or will not."""
        self._computing.discard(sequence, blocks)

    def match_cached(self, sequence: Sequence, first: int, num_blocks: int) -> list[int]:
        """The device blocks that hold a sequence's blocks from number `first` on, up to `num_blocks` in all."""
        self.extend_hashes(sequence, num_blocks)
        return self._device.index.match(sequence.block_hashes[:num_blocks], sequence.tokens, first)

    def content(self, sequence: Sequence, block: int) -> BlockContent | None:
        """What a block of a sequence holds; None unless its committed tokens fill it."""
        if (block + 1) * self._shape.block_size > min(sequence.num_committed, len(sequence.tokens)):
            return None
        self.extend_hashes(sequence, block + 1)
        return self.full_content(sequence, block)

    def full_content(self, sequence: Sequence, block: int) -> BlockContent:
        """The same of a block that is known to be full and hashed."""
        return BlockContent(sequence.block_hashes[block], pack_block(sequence.tokens, block, self._shape.block_size))

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Hashes a sequence's first `num_blocks` blocks, as far as they are not yet. Those of the prompt are hashed for
        the first one of its siblings only.
        """
        hashes, size = sequence.block_hashes, self._shape.block_size
        if num_blocks <= len(hashes):
            return
        num_of_prompt = min(num_blocks, len(sequence.request.prompt) // size)
        for first in sequence.siblings[:1]:
            hashes.extend(first.block_hashes[len(hashes) : num_of_prompt])
        root = root_hash(self._shape.fingerprint, sequence.request.salt)
        extend_hashes(hashes, root, sequence.tokens, size, num_blocks)

    def check_integrity(self, present: set[int]) -> None:
        """Raises AssertionError if a sequence is to compute blocks whose id is not among those present."""
        self._computing.check_integrity(present)
