"""The prefix index: finds blocks by the hash of their tokens and of all tokens before."""

from array import array
from collections.abc import KeysView
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256


def root_hash(fingerprint: bytes, salt: bytes) -> bytes:
    """The parent hash of a sequence's first block: equal only for the same model and the same tenant's salt."""
    return sha256(len(fingerprint).to_bytes(4, "big") + fingerprint + salt).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: list[int], block_size: int, num_blocks: int) -> None:
    """Appends hashes of a sequence's full blocks until there are `num_blocks`. Each includes the one before."""
    parent = hashes[-1] if hashes else root
    for block in range(len(hashes), num_blocks):
        parent = sha256(parent + pack_block(tokens, block, block_size)).digest()
        hashes.append(parent)


def pack_block(tokens: list[int], block: int, block_size: int) -> bytes:
    """The tokens of a sequence's block, as the index keeps them with its hash."""
    return array("I", tokens[block * block_size : (block + 1) * block_size]).tobytes()


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds: the hash of its tokens and of all before them, and its own tokens."""

    hash: bytes
    tokens: bytes


class PrefixIndex:
    """Block ids by hash, of blocks whose contents are committed. One block per hash."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, BlockContent] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._contents

    @property
    def block_ids(self) -> KeysView[int]:
        """The blocks in the index."""
        return self._contents.keys()

    def content(self, block_id: int) -> BlockContent:
        """The contents of a block that is in the index."""
        return self._contents[block_id]

    def has(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is in the index. Its tokens are not compared."""
        return block_hash in self._blocks

    def find(self, content: BlockContent) -> int | None:
        """The block with these contents. Compares the tokens as well as the hash."""
        block_id = self._blocks.get(content.hash)
        if block_id is None or self._contents[block_id].tokens != content.tokens:
            return None
        return block_id

    def match(self, hashes: Seq[bytes], tokens: list[int], first: int = 0) -> list[int]:
        """The longest run of a sequence's blocks, from number `first` on, that is in the index."""
        block_ids = []
        for block in range(first, len(hashes)):
            block_id = self._blocks.get(hashes[block])
            if block_id is None or self._contents[block_id].tokens != pack_block(tokens, block, self._block_size):
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> int:
        """Adds a block; returns the block that the index has for the hash, which may be another one."""
        known = self._blocks.setdefault(content.hash, block_id)
        if known == block_id:
            self._contents[block_id] = content
        return known

    def forget(self, block_ids: list[int]) -> None:
        """Removes blocks, which are about to be overwritten."""
        for block_id in block_ids:
            del self._blocks[self._contents.pop(block_id).hash]
