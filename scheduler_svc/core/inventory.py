"""What a worker's blocks still hold when a scheduler comes to it, and the tokens by which it knows them again."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from scheduler_svc.core.prefix import Content, extend_hashes, pack_block, root_hash


@dataclass(frozen=True, slots=True)
class Inventory:
    """By block id, the hash that a block of the device, or of the host, was labelled with when it was filled."""

    device: Mapping[int, bytes]
    host: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Chain:
    """The tokens of a sequence, from the first one of its prompt, under its tenant's salt."""

    salt: bytes
    tokens: Seq[int]


def recognize(labels: Mapping[int, bytes], num_blocks: int, chains: Iterable[Seq[Content]]) -> dict[int, Content]:
    """Which of a tier's blocks hold a part of a chain, heads before tails. One block for each hash."""
    by_hash = {block_hash: block_id for block_id, block_hash in labels.items() if 0 <= block_id < num_blocks}
    found = {}
    for chain in chains:
        for content in chain:
            block_id = by_hash.pop(content.hash, None)
            if block_id is not None:
                found[block_id] = content
    return found


def contents(chain: Chain, fingerprint: bytes, block_size: int) -> list[Content]:
    """What the full blocks of a sequence hold, from the first one on."""
    tokens, hashes = list(chain.tokens), list[bytes]()
    extend_hashes(hashes, root_hash(fingerprint, chain.salt), tokens, block_size, len(tokens) // block_size)
    return [Content(block_hash, pack_block(tokens, block, block_size)) for block, block_hash in enumerate(hashes)]
