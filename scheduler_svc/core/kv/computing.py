"""Blocks that running sequences are about to compute."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from scheduler_svc.core.request import Sequence


class ComputingBlocks:
    """By block hash, the sequence that is about to compute the block: the first one, or one that has overtaken it."""

    def __init__(self) -> None:
        self._sequences: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence, first: int, overtaken: Sequence | None = None) -> None:
        """A sequence is about to compute its blocks from number `first` on, before one that it has overtaken."""
        for block_hash in sequence.block_hashes[first:]:
            if self._sequences.get(block_hash, overtaken) is overtaken:
                self._sequences[block_hash] = sequence

    def discard(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """A sequence has computed these of its blocks, or will not."""
        for block in blocks:
            block_hash = sequence.block_hashes[block]
            if self._sequences.get(block_hash) is sequence:
                del self._sequences[block_hash]

    def find(self, hashes: Seq[bytes], first: int) -> tuple[Sequence, int] | None:
        """The sequence that computes the block number `first` of these hashes, and the first block that it does not."""
        producer = self._sequences.get(hashes[first]) if first < len(hashes) else None
        if producer is None:
            return None
        end = first
        while end < len(hashes) and self._sequences.get(hashes[end]) is producer:
            end += 1
        return producer, end

    def check_integrity(self, present: set[int]) -> None:
        """Raises AssertionError unless each of the sequences has one of these ids."""
        assert all(s.id in present for s in self._sequences.values()), "a sequence that left is to compute a block"
