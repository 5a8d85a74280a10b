"""The prefix index: finds blocks that hold the keys and values of a prompt's beginning."""

from array import array
from dataclasses import dataclass
from hashlib import sha256


def root_hash(fingerprint: bytes, salt: bytes) -> bytes:
    """The parent of a sequence's first block: equal only for the same model and the same tenant's salt."""
    return sha256(len(fingerprint).to_bytes(4, "big") + fingerprint + salt).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: list[int], block_size: int, num_blocks: int) -> None:
    """Append the hashes of a sequence's full blocks until there are `num_blocks`, each chained to the one before."""
    parent = hashes[-1] if hashes else root
    for block in range(len(hashes), num_blocks):
        parent = sha256(parent + _pack(tokens, block, block_size)).digest()
        hashes.append(parent)


def _pack(tokens: list[int], block: int, block_size: int) -> bytes:
    return array("I", tokens[block * block_size : (block + 1) * block_size]).tobytes()


@dataclass(frozen=True, slots=True)
class _Entry:
    block_id: int
    tokens: bytes


class PrefixIndex:
    """Block hash to block id, for blocks whose contents a commit has confirmed. One block per hash."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[bytes, _Entry] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashes

    def match(self, hashes: list[bytes], tokens: list[int]) -> list[int]:
        """The blocks of the longest prefix that is held. A hit compares the tokens as well as the hash."""
        block_ids = []
        for block, block_hash in enumerate(hashes):
            entry = self._entries.get(block_hash)
            if entry is None or entry.tokens != _pack(tokens, block, self._block_size):
                break
            block_ids.append(entry.block_id)
        return block_ids

    def publish(self, block_id: int, block_hash: bytes, tokens: list[int], block: int) -> None:
        """Say that a block holds block number `block` of `tokens`. Where another one does already, that one stays."""
        if block_hash not in self._entries:
            self._entries[block_hash] = _Entry(block_id, _pack(tokens, block, self._block_size))
            self._hashes[block_id] = block_hash

    def forget(self, block_ids: list[int]) -> None:
        """Drop blocks whose contents are about to be overwritten."""
        for block_id in block_ids:
            del self._entries[self._hashes.pop(block_id)]

    def published(self, block_ids: list[int]) -> set[int]:
        """Those of the blocks that can be found here."""
        return {block_id for block_id in block_ids if block_id in self._hashes}
