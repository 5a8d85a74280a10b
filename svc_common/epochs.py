"""Epochs: numbers of leaders' terms, in microseconds since 1970.

A window keeps out numbers that no leader can have begun: at most a day ahead of the clock, and below 2^53, because
scripts in Redis compute with doubles.
"""

EPOCH_LIMIT = 2**53
EPOCH_AHEAD = 86400 * 10**6
"""How far an epoch may be ahead of the clock, in microseconds."""


def is_in_window(epoch: int, clock: int) -> bool:
    """Whether a leader can have begun an epoch, by a clock in microseconds since 1970."""
    return epoch < min(EPOCH_LIMIT, clock + EPOCH_AHEAD)
