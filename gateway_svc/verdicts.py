"""Stop strings that were found in requests which are over here, and of which a next scheduler might not know."""

import time
from collections.abc import Iterator

from quire.scheduler.v1 import scheduler_pb2

_KEPT_SECONDS = 60.0


class Verdicts:
    """They are kept until the store has them, or for as long as a scheduler would run such a request on."""

    def __init__(self) -> None:
        # By key, oldest first: when they were noted, and where each sequence ends.
        self._cuts: dict[str, tuple[float, dict[int, int]]] = {}

    def add(self, key: str, cuts: dict[int, int]) -> None:
        """Notes the ends of a request's sequences, in tokens by index."""
        now = time.monotonic()
        while self._cuts and self._cuts[oldest := next(iter(self._cuts))][0] < now - _KEPT_SECONDS:
            del self._cuts[oldest]
        self._cuts[key] = (now, cuts)

    def settle(self, key: str, durable: scheduler_pb2.Durable) -> None:
        """Forgets what the store has."""
        _, cuts = self._cuts.get(key, (0.0, {}))
        if cuts.get(durable.index) == durable.num_tokens:
            del cuts[durable.index]

    def forget(self, key: str) -> None:
        """Forgets a request: it is over everywhere, or its key goes to another."""
        self._cuts.pop(key, None)

    def __iter__(self) -> Iterator[scheduler_pb2.Finish]:
        for key, (_, cuts) in self._cuts.items():
            for index, num_tokens in cuts.items():
                yield scheduler_pb2.Finish(key=key, index=index, num_tokens=num_tokens)
