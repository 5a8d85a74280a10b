"""What blocks hold, by the labels that schedulers gave them: what outlives a scheduler that dies."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker_svc.step import BlockLabels, Moves


@dataclass(frozen=True, slots=True)
class Inventory:
    """The labels of blocks that still hold what these say."""

    device: BlockLabels
    host: BlockLabels


class Labels:
    """The labels of both tiers, from one generation of steps to the next. For the runner's thread.

    A label is given once its block is filled, and goes before the block is written again: a write that fails halfway
    leaves none behind.
    """

    def __init__(self) -> None:
        self._device: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def give(self, device: BlockLabels, host: BlockLabels) -> None:
        """These blocks hold what their labels say from now on."""
        self._device.update(device)
        self._host.update(host)

    def drop_moved(self, moves: Moves) -> None:
        """A step's moves are about to be made."""
        self.drop_written(block for pairs in (moves.swap_in, moves.copies) for _, block in pairs)
        for _, block in moves.swap_out:
            self._host.pop(block, None)

    def drop_written(self, block_ids: Iterable[int]) -> None:
        """These blocks of the device are about to be written."""
        for block in block_ids:
            self._device.pop(block, None)

    def inventory(self) -> Inventory:
        """All labels there are, as values of their own."""
        return Inventory(list(self._device.items()), list(self._host.items()))
