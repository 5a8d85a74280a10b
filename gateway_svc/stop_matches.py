"""Stop strings that were found in requests which are over here, and of which a next scheduler might not know."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2

_RETENTION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _KeptMatches:
    """`stop_matches` says where sequences of a submission end, in tokens by index."""

    noted_at: float
    submission_id: str
    stop_matches: dict[int, int]


class StopMatches:
    """They are kept until the store has them, or for as long as a scheduler would run such a request on."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptMatches] = {}  # by key, oldest first

    def add(self, key: str, submission_id: str, stop_matches: dict[int, int]) -> None:
        """Notes the ends of a request's sequences, in tokens by index."""
        self._drop_expired()
        self._kept.pop(key, None)
        self._kept[key] = _KeptMatches(time.monotonic(), submission_id, stop_matches)

    def confirm_durable(self, key: str, durable: scheduler_pb2.Durable) -> None:
        """Forgets what the store has."""
        kept = self._kept.get(key)
        if kept is not None and kept.stop_matches.get(durable.index) == durable.num_tokens:
            del kept.stop_matches[durable.index]
            if not kept.stop_matches:
                del self._kept[key]

    def forget(self, key: str) -> None:
        """Forgets a request: it is over everywhere."""
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
        while self._kept and self._kept[first := next(iter(self._kept))].noted_at < oldest:
            del self._kept[first]
