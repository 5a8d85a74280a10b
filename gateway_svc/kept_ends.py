"""How sequences ended whose readers have left with everything, for a new scheduler that may lack these ends."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2

_RETENTION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _KeptEnd:
    """`unflushed` holds the last tokens of a submission's sequences, by index."""

    added_at: float
    submission_id: str
    model_fingerprint: bytes
    unflushed: dict[int, scheduler_pb2.UnflushedTokens]


class KeptEnds:
    """Each is kept until it is durable, or for 60 s: longer than a scheduler runs a request without a gateway."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptEnd] = {}  # by key, oldest first

    def add(
        self,
        key: str,
        submission_id: str,
        unflushed: Iterable[scheduler_pb2.UnflushedTokens],
        model_fingerprint: bytes = b"",
    ) -> None:
        """Keeps the tokens of a submission's sequences that are not known to be durable, up to their ends."""
        self._drop_expired()
        self._kept.pop(key, None)
        if kept := {one.index: one for one in unflushed}:
            self._kept[key] = _KeptEnd(time.monotonic(), submission_id, model_fingerprint, kept)

    def confirm_durable(self, key: str, durable: scheduler_pb2.Durable) -> None:
        """Drops the end of a sequence, all tokens of which are durable."""
        kept = self._kept.get(key)
        one = None if kept is None else kept.unflushed.get(durable.index)
        if kept is not None and one is not None and one.offset + len(one.token_ids) == durable.num_tokens:
            del kept.unflushed[durable.index]
            if not kept.unflushed:
                del self._kept[key]

    def forget(self, key: str) -> None:
        """Drops those of a request that has ended at the scheduler."""
        self._kept.pop(key, None)

    def __iter__(self) -> Iterator[scheduler_pb2.Attach]:
        """The commands with which a scheduler learns them, without ids."""
        self._drop_expired()
        for key, kept in self._kept.items():
            yield scheduler_pb2.Attach(
                key=key,
                submission_id=kept.submission_id,
                model_fingerprint=kept.model_fingerprint,
                unflushed=kept.unflushed.values(),
            )

    def _drop_expired(self) -> None:
        oldest = time.monotonic() - _RETENTION_SECONDS
        while self._kept and self._kept[first := next(iter(self._kept))].added_at < oldest:
            del self._kept[first]
