"""Blocks on their way between device and host: from the plan that names them until the worker says they are there."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.plan import BlockPair, Direction
from scheduler_svc.core.prefix import Content
from scheduler_svc.core.sequence import Image, Sequence
from scheduler_svc.core.tier import Tier


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks that are moved for one purpose, together.

    Out for the image of a sequence, or for nobody, as backups of cached blocks; `contents` says what full blocks hold.
    In for a sequence that waits for them.
    """

    pairs: list[BlockPair]
    purpose: Sequence | Image | None
    contents: list[Content | None]


class Transfers:
    """Moves that wait for the next step, and moves under way. They pin the blocks at both ends.

    All moves of one step in one direction are confirmed as one.
    """

    def __init__(self, device: Tier, host: Tier) -> None:
        self._tiers = (device, host)
        self._waiting: dict[Direction, list[Move]] = {Direction.OUT: [], Direction.IN: []}
        self._under_way: dict[tuple[int, Direction], list[Move]] = {}

    def __len__(self) -> int:
        """How many transfers are under way."""
        return len(self._under_way)

    @property
    def has_waiting(self) -> bool:
        """Whether there is anything for the next step to carry."""
        return any(self._waiting.values())

    def add(self, direction: Direction, move: Move) -> None:
        """Have the next step carry a move."""
        device, host = self._tiers
        device.pool.pin(pair.device for pair in move.pairs)
        host.pool.pin(pair.host for pair in move.pairs)
        self._waiting[direction].append(move)

    def send(self, step_id: int, direction: Direction) -> list[BlockPair]:
        """What waits in this direction, which goes with this step."""
        moves = self._waiting[direction]
        if not moves:
            return []
        self._waiting[direction] = []
        self._under_way[step_id, direction] = moves
        return [pair for move in moves for pair in move.pairs]

    def knows(self, step_id: int, direction: Direction) -> bool:
        """Whether this transfer is under way."""
        return (step_id, direction) in self._under_way

    def finish(self, step_id: int, direction: Direction) -> list[Move]:
        """A transfer is over, well or not; its moves, of which each is then to be let go by `unpin`."""
        return self._under_way.pop((step_id, direction))

    def unpin(self, direction: Direction, move: Move) -> None:
        """Let go of a move's blocks. Those that have a copy on the host now are the first that the device gives up."""
        device, host = self._tiers
        device.unpin((pair.device for pair in move.pairs), first_to_go=direction is Direction.OUT)
        host.unpin(pair.host for pair in move.pairs)

    def pins(self) -> tuple[Counter[int], Counter[int]]:
        """How many moves name each block of the device, and of the host."""
        pairs = [pair for move in self._all() for pair in move.pairs]
        return Counter(pair.device for pair in pairs), Counter(pair.host for pair in pairs)

    def _all(self) -> Iterable[Move]:
        for moves in (*self._waiting.values(), *self._under_way.values()):
            yield from moves
