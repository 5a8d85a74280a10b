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


def epoch_clock() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


class LatestTerm:
    """The latest term that a process has seen, an epoch and a generation.

    An epoch that is more than a day ahead of the clock does not keep out one that is not: no leader can have begun it,
    unless clocks differ that much, as while Redis' clock was wrong.
    """

    def __init__(self) -> None:
        self.last = (0, 0)
        self.last_in_window = (0, 0)

    def before(self, epoch: int, clock: int) -> tuple[int, int]:
        """The term that one of this epoch must follow."""
        is_usual, was_usual = is_in_window(epoch, clock), is_in_window(self.last[0], clock)
        return self.last_in_window if is_usual and not was_usual else self.last

    def begin(self, term: tuple[int, int], clock: int) -> None:
        """Notes a term that follows."""
        self.last = term
        if is_in_window(term[0], clock):
            self.last_in_window = term


class LatestEpoch:
    """The latest epoch that a process has seen, by the rule of LatestTerm."""

    def __init__(self) -> None:
        self._term = LatestTerm()

    def __int__(self) -> int:
        return self._term.last[0]

    def is_older(self, epoch: int) -> bool:
        """Whether a later epoch than this one has begun."""
        return epoch < self._term.before(epoch, epoch_clock())[0]

    def take(self, epoch: int) -> bool:
        """Notes an epoch, unless it is older; returns whether it was noted."""
        if self.is_older(epoch):
            return False
        self._term.begin((epoch, 0), epoch_clock())
        return True
