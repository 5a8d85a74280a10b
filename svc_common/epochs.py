"""Epochs: numbers of leaders' terms, in microseconds since 1970.

A window keeps out numbers that no leader can have begun: at most a day ahead of the clock, and below 2^53, because
scripts in Redis compute with doubles.
"""

import time

EPOCH_LIMIT = 2**53
EPOCH_AHEAD = 86400 * 10**6
"""How far an epoch may be ahead of the clock, in microseconds."""


def is_in_window(epoch: int, clock: int) -> bool:
    """Whether a leader can have begun an epoch, by a clock in microseconds since 1970."""
    return epoch < min(EPOCH_LIMIT, clock + EPOCH_AHEAD)


class LatestEpoch:
    """The latest epoch that a process has seen.

    One that is more than a day ahead of its clock does not keep out one that is not: no leader can have begun it,
    unless clocks differ that much, as while Redis' clock was wrong.
    """

    def __init__(self) -> None:
        self._latest = 0
        self._latest_in_window = 0

    def __int__(self) -> int:
        return self._latest

    def is_older(self, epoch: int) -> bool:
        """Whether a later epoch than this one has begun."""
        if epoch >= self._latest:
            return False
        clock = time.time_ns() // 1000
        is_usual, was_usual = is_in_window(epoch, clock), is_in_window(self._latest, clock)
        return epoch < self._latest_in_window or not is_usual or was_usual

    def take(self, epoch: int) -> bool:
        """Notes an epoch, unless it is older; returns whether it was noted."""
        if self.is_older(epoch):
            return False
        self._latest = epoch
        if is_in_window(epoch, time.time_ns() // 1000):
            self._latest_in_window = epoch
        return True
