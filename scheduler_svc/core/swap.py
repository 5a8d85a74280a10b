"""Blocks on their way between device and host: from the plan that names them until the worker says they are there."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.block_tier import BlockTier
from scheduler_svc.core.plan import BlockPair, Direction
from scheduler_svc.core.prefix import BlockContent
from scheduler_svc.core.sequence import Sequence, SwappedKV


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks that are moved for one purpose, together.

    Out for the image of a sequence, or for nobody, as backups of cached blocks; `contents` says what full blocks hold.
    In for a sequence that waits for them.
    """

    pairs: list[BlockPair]
    purpose: Sequence | SwappedKV | None
    contents: list[BlockContent | None]


class SwapManager:
    """Moves that wait for the next step, and moves under way. They pin the blocks at both ends.

    All moves of one step in one direction are confirmed as one.
    """

    def __init__(self, device: BlockTier, host: BlockTier) -> None:
        self._tiers = (device, host)
        self._waiting: dict[Direction, list[Swap]] = {Direction.OUT: [], Direction.IN: []}
        self._in_progress: dict[tuple[int, Direction], list[Swap]] = {}

    def __len__(self) -> int:
        """How many transfers are under way."""
        return len(self._in_progress)

    @property
    def has_waiting(self) -> bool:
        """Whether there is anything for the next step to carry."""
        return any(self._waiting.values())

    def add(self, direction: Direction, swap: Swap) -> None:
        """Have the next step carry a move."""
        device, host = self._tiers
        device.pool.pin(pair.device for pair in swap.pairs)
        host.pool.pin(pair.host for pair in swap.pairs)
        self._waiting[direction].append(swap)

    def send(self, step_id: int, direction: Direction) -> list[BlockPair]:
        """What waits in this direction, which goes with this step."""
        swaps = self._waiting[direction]
        if not swaps:
            return []
        self._waiting[direction] = []
        self._in_progress[step_id, direction] = swaps
        return [pair for swap in swaps for pair in swap.pairs]

    def is_in_progress(self, step_id: int, direction: Direction) -> bool:
        """Whether this transfer is under way."""
        return (step_id, direction) in self._in_progress

    def finish(self, step_id: int, direction: Direction) -> list[Swap]:
        """A transfer is over, well or not; its moves, of which each is then to be let go by `unpin`."""
        return self._in_progress.pop((step_id, direction))

    def unpin(self, direction: Direction, swap: Swap) -> None:
        """Let go of a move's blocks. Those that have a copy on the host now are the first that the device gives up."""
        device, host = self._tiers
        device.unpin((pair.device for pair in swap.pairs), first_to_go=direction is Direction.OUT)
        host.unpin(pair.host for pair in swap.pairs)

    def pins(self) -> tuple[Counter[int], Counter[int]]:
        """How many moves name each block of the device, and of the host."""
        pairs = [pair for swap in self._all() for pair in swap.pairs]
        return Counter(pair.device for pair in pairs), Counter(pair.host for pair in pairs)

    def _all(self) -> Iterable[Swap]:
        for swaps in (*self._waiting.values(), *self._in_progress.values()):
            yield from swaps
