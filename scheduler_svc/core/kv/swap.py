"""Copies between device and host, from the plan that names their blocks until the worker confirms them."""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.prefix_index import BlockContent
from scheduler_svc.core.request import Sequence, SwappedKV
from scheduler_svc.core.step import BlockPair, Direction


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks that are copied together.

    Out: for `swapped_kv` of `sequence`, or as backups of cached blocks, without a sequence; `contents` is what full
    blocks hold. In: for `sequence`, which waits for them.
    """

    pairs: list[BlockPair]
    contents: list[BlockContent | None]
    sequence: Sequence | None = None
    swapped_kv: SwappedKV | None = None


class SwapManager:
    """Swaps that the next step will carry, and swaps in progress. They pin their blocks on both tiers.

    The worker confirms all swaps of one step in one direction together.
    """

    def __init__(self, device: BlockTier, host: BlockTier) -> None:
        self._tiers = (device, host)
        self._waiting: dict[Direction, list[Swap]] = {Direction.OUT: [], Direction.IN: []}
        self._in_progress: dict[tuple[int, Direction], list[Swap]] = {}

    def __len__(self) -> int:
        """Transfers in progress: steps with swaps, counted by direction."""
        return len(self._in_progress)

    @property
    def has_waiting(self) -> bool:
        """Whether the next step has swaps to carry."""
        return any(self._waiting.values())

    def add(self, direction: Direction, swap: Swap) -> None:
        """Has the next step carry a swap."""
        device, host = self._tiers
        device.pool.pin(pair.device for pair in swap.pairs)
        host.pool.pin(pair.host for pair in swap.pairs)
        self._waiting[direction].append(swap)

    def send(self, step_id: int, direction: Direction) -> list[BlockPair]:
        """The swaps that wait in this direction go with this step."""
        swaps = self._waiting[direction]
        if not swaps:
            return []
        self._waiting[direction] = []
        self._in_progress[step_id, direction] = swaps
        return [pair for swap in swaps for pair in swap.pairs]

    def is_in_progress(self, step_id: int, direction: Direction) -> bool:
        """Whether this transfer is sent and not confirmed."""
        return (step_id, direction) in self._in_progress

    def forget(self, contents: Container[BlockContent]) -> None:
        """Swaps that are not done publish none of these contents."""
        for swap in self._all():
            swap.contents[:] = [None if content in contents else content for content in swap.contents]

    def finish(self, step_id: int, direction: Direction) -> list[Swap]:
        """A transfer is done or failed. Returns its swaps; the caller unpins each."""
        return self._in_progress.pop((step_id, direction))

    def unpin(self, direction: Direction, swap: Swap) -> None:
        """Unpin a swap's blocks. Cached device blocks that have a copy on the host now are evicted first."""
        device, host = self._tiers
        device.unpin((pair.device for pair in swap.pairs), evict_first=direction is Direction.OUT)
        host.unpin(pair.host for pair in swap.pairs)

    def pins(self) -> tuple[Counter[int], Counter[int]]:
        """How many swaps name each block of the device, and of the host."""
        pairs = [pair for swap in self._all() for pair in swap.pairs]
        return Counter(pair.device for pair in pairs), Counter(pair.host for pair in pairs)

    def _all(self) -> Iterable[Swap]:
        for swaps in (*self._waiting.values(), *self._in_progress.values()):
            yield from swaps
