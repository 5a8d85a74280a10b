"""Stop strings that were found in requests which are over here, and of which a next scheduler might not know."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2

_KEPT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Noted:
    """`cuts` says where sequences of a submission end, in tokens by index."""

    at: float
    submission_id: str
    cuts: dict[int, int]


class Verdicts:
    """They are kept until the store has them, or for as long as a scheduler would run such a request on."""

    def __init__(self) -> None:
        self._noted: dict[str, _Noted] = {}  # by key, oldest first

    def add(self, key: str, submission_id: str, cuts: dict[int, int]) -> None:
        """Notes the ends of a request's sequences, in tokens by index."""
        self._forget_old()
        self._noted.pop(key, None)
        self._noted[key] = _Noted(time.monotonic(), submission_id, cuts)

    def settle(self, key: str, durable: scheduler_pb2.Durable) -> None:
        """Forgets what the store has."""
        noted = self._noted.get(key)
        if noted is not None and noted.cuts.get(durable.index) == durable.num_tokens:
            del noted.cuts[durable.index]
            if not noted.cuts:
                del self._noted[key]

    def forget(self, key: str) -> None:
        """Forgets a request: it is over everywhere."""
        self._noted.pop(key, None)

    def __iter__(self) -> Iterator[scheduler_pb2.Finish]:
        self._forget_old()
        for key, noted in self._noted.items():
            for index, num_tokens in noted.cuts.items():
                yield scheduler_pb2.Finish(
                    key=key, index=index, num_tokens=num_tokens, submission_id=noted.submission_id
                )

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _KEPT_SECONDS
        while self._noted and self._noted[first := next(iter(self._noted))].at < oldest:
            del self._noted[first]
