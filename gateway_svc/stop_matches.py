"""Stop strings found in requests that have no reader here any more, for a new scheduler that may not know of them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2

_RETENTION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _KeptMatches:
    """`stop_matches` holds where sequences of a submission end, in tokens, by index."""

    added_at: float
    submission_id: str
    stop_matches: dict[int, int]


class StopMatches:
    """Each is kept until it is durable, or for 60 s: longer than a scheduler runs a request without a gateway."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptMatches] = {}  # by key, oldest first

    def add(self, key: str, submission_id: str, stop_matches: dict[int, int]) -> None:
        """Keeps the ends of a submission's sequences, in tokens, by index."""
        self._drop_expired()
        self._kept.pop(key, None)
        self._kept[key] = _KeptMatches(time.monotonic(), submission_id, stop_matches)

    def confirm_durable(self, key: str, durable: scheduler_pb2.Durable) -> None:
        """Drops a stop match that is durable."""
        kept = self._kept.get(key)
        if kept is not None and kept.stop_matches.get(durable.index) == durable.num_tokens:
            del kept.stop_matches[durable.index]
            if not kept.stop_matches:
                del self._kept[key]

    def forget(self, key: str) -> None:
        """Drops those of a request that has ended at the scheduler."""
        self._kept.pop(key, None)

    def __iter__(self) -> Iterator[scheduler_pb2.Finish]:
        self._drop_expired()
        for key, kept in self._kept.items():
            for index, num_tokens in kept.stop_matches.items():
                yield scheduler_pb2.Finish(
                    key=key, index=index, num_tokens=num_tokens, submission_id=kept.submission_id
                )

    def _drop_expired(self) -> None:
        oldest = time.monotonic() - _RETENTION_SECONDS
        while self._kept and self._kept[first := next(iter(self._kept))].added_at < oldest:
            del self._kept[first]
