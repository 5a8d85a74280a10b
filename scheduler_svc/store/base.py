"""What the scheduler asks of a store. `tests/unit/scheduler_svc/store` holds every one of them to it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.request_log import RequestLog, State


class StoreUnavailable(Exception):  # noqa: N818
    """The store does not answer. The text is for the operator."""


class StaleEpoch(Exception):  # noqa: N818
    """A scheduler of a later term has written: this one is fenced, and nothing of the call was done."""


@dataclass(frozen=True, slots=True)
class Write:
    """New tokens of one sequence of a submission, from `offset` on, and its end where it has ended.

    Writing the same tokens again changes nothing, and another submission's record is left alone. With `truncates`
    everything beyond these tokens is removed, an end included. `logprobs`, one for each token or None where they were
    not asked for, and `end` are serialized messages. A `fingerprint` becomes the record's, unless it is empty.
    """

    key: str
    submission_id: str
    index: int
    offset: int
    token_ids: Sequence[int]
    logprobs: Sequence[bytes] | None = None
    cached_tokens: int | None = None
    end: bytes | None = None
    score: float | None = None
    truncates: bool = False
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when (seconds since 1970) a submission ended. Another submission's record is left alone.

    So is this one's where a write of the same batch left a gap: what has ended is whole.
    """

    key: str
    submission_id: str
    state: State
    at: float
    failure: scheduler_v1.FailureReason | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """A write, by its place in the batch, that began beyond what the store has, and was not done.

    `num_tokens` is how many the store has of the sequence; None: there is no record.
    """

    place: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class KeyTaken:
    """A submission of which nothing of the batch was done: its key is another submission's, which stands."""

    key: str
    submission_id: str


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """What the steps since the last batch brought. Records come before the rest, and without tokens.

    A submission's record that is there stays as it is. Another submission's stands where it has finished, or is live
    and has tokens: a request that ran under its name while the store was away must not erase what clients were
    promised. Else it gives way to one that was accepted no earlier.
    """

    records: list[RequestLog] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)


class Store(Protocol):
    """Records of requests, and the lease on leading.

    Every call raises StoreUnavailable where the store does not answer in time, and those that take an epoch StaleEpoch
    where a later one has been seen. Every key that is written has a TTL, renewed while its request is live.
    """

    @property
    def is_answering(self) -> bool:
        """Whether it answered when it was last needed."""
        ...

    @property
    def num_restarts(self) -> int:
        """Grows whenever the store may have lost what it took last, as one that was started anew."""
        ...

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        """Record an accepted request without its tokens, unless a record is in its way.

        Returns that record, with all its tokens, or None where this one is recorded. In the way is another submission's
        that is live or finished, and this one's own if it has gone on: one that has tokens, or has finished.
        """
        ...

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        """Take in a batch, in one call; returns what could not be done. Not to be called concurrently."""
        ...

    async def read(self, key: str) -> RequestLog | None:
        """The record of a request, with all its tokens, all of them durable; None where there is none."""
        ...

    async def live(self) -> list[RequestLog]:
        """Every record whose request has not ended, in order of acceptance."""
        ...

    async def renew(self, keys: Iterable[str], epoch: int) -> None:
        """Start the TTL of live requests anew."""
        ...

    async def leader(self) -> str | None:
        """Who holds the lease."""
        ...

    async def take_lease(self, holder: str, seconds: float, floor: int = 0, epoch: int | None = None) -> int | None:
        """Become the leader where there is none, or again: returns a new epoch, above any before and above `floor`.

        None while another holder has the lease, or where `epoch` is given and another holder took a later one. A call
        that was not answered may be repeated.
        """
        ...

    async def keep_lease(self, holder: str, epoch: int, seconds: float) -> bool:
        """Renew the lease, also one that has run out meanwhile. False where there has been a later epoch.

        The answer is waited for half as long as the lease lasts, so that there is time to ask again.
        """
        ...

    async def release_lease(self, holder: str) -> None:
        """Let another one lead at once."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
