"""The block-hash report: which blocks a worker still holds when a new scheduler connects."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256

from scheduler_svc.core.kv.prefix_index import BlockContent, root_hash

_RUN = 32  # blocks that are hashed and looked up at once


@dataclass(frozen=True, slots=True)
class BlockHashReport:
    """The hash of each block that the worker holds, by block id, on the device and on the host."""

    device: Mapping[int, bytes]
    host: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The tokens of a request and its tenant's salt: the prompt, and the output of each of its sequences."""

    salt: bytes
    prompt: Seq[int]
    outputs: Seq[Seq[int]] = ()


class BlockHashMatcher:
    """Finds the blocks of each tier that hold a part of a token chain: one per hash, heads before tails.

    A chain is followed only as far as its blocks are there, and a prefix that several chains share is hashed once. So
    the work is bounded by the blocks that the worker holds, not by the tokens of all requests.
    """

    def __init__(
        self, hash_report: BlockHashReport, fingerprint: bytes, block_size: int, sizes: tuple[int, int]
    ) -> None:
        """`sizes` are the numbers of blocks on the device and on the host. Larger ids are ignored."""
        self.device: dict[int, BlockContent] = {}
        self.host: dict[int, BlockContent] = {}
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._device_ids, self._host_ids = (
            {block_hash: block_id for block_id, block_hash in hashes.items() if 0 <= block_id < num_blocks}
            for hashes, num_blocks in zip((hash_report.device, hash_report.host), sizes, strict=True)
        )
        self._runs: dict[
            tuple[bytes, bytes], bytes | None
        ] = {}  # by the hash before a run and its tokens, the hash after it

    def match(self, chain: TokenChain) -> None:
        """Finds the blocks of a chain."""
        rest = len(chain.prompt) % self._block_size
        num_full = len(chain.prompt) - rest
        parent = self._match(root_hash(self._fingerprint, chain.salt), chain.prompt, num_full)
        if parent is None:
            return
        begun = list(chain.prompt[num_full:])
        for output in chain.outputs:
            num_full = (rest + len(output)) // self._block_size * self._block_size
            if num_full:
                self._match(parent, [*begun, *output], num_full)

    def _match(self, parent: bytes, tokens: Seq[int], end: int) -> bytes | None:
        """Finds the blocks after the hash `parent` that the tokens up to `end` fill.

        Returns the last one's hash; None if a block is missing.
        """
        size = _RUN * self._block_size
        for start in range(0, end, size):
            run = parent, array("I", tokens[start : min(start + size, end)]).tobytes()
            if run not in self._runs:
                self._runs[run] = self._find(*run)
            after = self._runs[run]
            if after is None:
                return None
            parent = after
        return parent

    def _find(self, parent: bytes, run: bytes) -> bytes | None:
        size = self._block_size * array("I").itemsize
        for start in range(0, len(run), size):
            content = BlockContent(sha256(parent + run[start : start + size]).digest(), run[start : start + size])
            device_id, host_id = self._device_ids.get(content.hash), self._host_ids.get(content.hash)
            if device_id is not None:
                self.device.setdefault(device_id, content)
            if host_id is not None:
                self.host.setdefault(host_id, content)
            if device_id is None and host_id is None:
                return None
            parent = content.hash
        return parent
