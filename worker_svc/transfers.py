"""What a runner has moved: checks the blocks that a step names, and tells of each transfer once, when it is done."""

from collections import Counter, deque
from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.identity import Limits
from worker_svc.mover import Mover
from worker_svc.sequences import Refused
from worker_svc.step import BlockPairs, Direction, Moves, Transfer


class Transfers:
    """The transfers of one generation of steps. For the runner's thread."""

    def __init__(self, mover: Mover, limits: Limits) -> None:
        self._mover = mover
        self._num_blocks = {Direction.OUT: limits.num_blocks, Direction.IN: limits.num_host_blocks}
        # In the order of their steps.
        self._pending: deque[tuple[int, Future[Transfer]]] = deque()
        # Blocks that should have been copied into, and were not: what is in them is of no use to anybody.
        self._spoiled: set[int] = set()

    @property
    def pending(self) -> "list[Future[Transfer]]":
        """Transfers that nobody was told of yet."""
        return [future for _, future in self._pending]

    def begin(self, step_id: int, moves: Moves) -> "list[Future[Any]]":
        """Have a step's blocks moved. What is returned must be done before the step is; its errors are the step's.

        A swap with a block that there is not fails as a whole. Of copies, such a one alone is left out, and fails the
        sequences that stand on it.
        """
        self._swap(step_id, Direction.OUT, moves.swap_out)
        self._swap(step_id, Direction.IN, moves.swap_in)
        if not moves.copies:
            return []
        good = self._copyable(moves.copies)
        filled = {destination for _, destination in good}
        self._spoiled = (self._spoiled - filled) | ({destination for _, destination in moves.copies} - filled)
        return [self._mover.copy(good)] if good else []

    def take_done(self, step_id: int) -> list[Transfer]:
        """The transfers of steps up to this one that are done and were not told of. Raises where the device is lost."""
        told, left = [], deque[tuple[int, Future[Transfer]]]()
        for begun, future in self._pending:
            if begun <= step_id and future.done():
                told.append(future.result())
            else:
                left.append((begun, future))
        self._pending = left
        return told

    def held_up_seconds(self, step_id: int, told: Items[Transfer]) -> float:
        """What transfers of this step, among those that it tells of, took of its own time."""
        if not self._mover.holds_up_steps:
            return 0.0
        return sum(transfer.seconds for transfer in told if transfer.step_id == step_id)

    @property
    def has_spoiled(self) -> bool:
        """Whether there are blocks that should have been copied into and were not."""
        return bool(self._spoiled)

    def check_copied(self, *tables: Items[int] | NDArray[np.int32]) -> None:
        """Raises Refused where one of these blocks should have been copied into and was not. It says so once."""
        named = {int(block) for table in tables for block in table} & self._spoiled
        self._spoiled -= named
        if named:
            raise Refused("a copy into one of its blocks named a block that there is not, or a block twice")

    def drop(self) -> None:
        """Give up all that is not done, and forget all."""
        self._mover.drop()
        self._pending.clear()
        self._spoiled.clear()

    def _swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> None:
        if not pairs:
            return
        why_not = self._why_not(direction, pairs)
        if why_not is None:
            if direction is Direction.IN:
                self._spoiled -= {destination for _, destination in pairs}
            future = self._mover.swap(step_id, direction, pairs)
        else:
            future = Future()
            future.set_result(Transfer(step_id, direction, len(pairs), 0.0, why_not))
        self._pending.append((step_id, future))

    def _why_not(self, direction: Direction, pairs: BlockPairs) -> str | None:
        back = Direction.IN if direction is Direction.OUT else Direction.OUT
        sources, destinations = self._num_blocks[direction], self._num_blocks[back]
        if any(source >= sources or destination >= destinations for source, destination in pairs):
            device, host = self._num_blocks[Direction.OUT], self._num_blocks[Direction.IN]
            return f"it names a block beyond the {device} of the device or the {host} of the host"
        if len({destination for _, destination in pairs}) < len(pairs):
            return "it names a destination twice"
        return None

    def _copyable(self, copies: BlockPairs) -> BlockPairs:
        end = self._num_blocks[Direction.OUT]
        sources = {source for source, _ in copies}
        times = Counter(destination for _, destination in copies)
        return [
            (source, destination)
            for source, destination in copies
            if source < end and destination < end and times[destination] == 1 and destination not in sources
        ]
