"""The interface of a store. The tests in `tests/unit/scheduler_svc/store` check every implementation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.request_log import RequestLog, State


class StoreUnavailable(Exception):  # noqa: N818
    """The store does not answer. The text is for the operator."""


class CallNotSent(StoreUnavailable):
    """The call was not sent, and so has no effect. Any other one may have one yet, when the store goes on."""


class StaleEpoch(Exception):  # noqa: N818
    """A scheduler of a later term has written: this one is fenced, and the call had no effect."""


class DeletedSubmission(Exception):  # noqa: N818
    """This submission was deleted or withdrawn a short time ago: it is not recorded again."""


class EpochOutsideWindow(Exception):  # noqa: N818
    """No epoch above the given one is begun: it is outside the window of epochs that a leader can have begun."""


class UnusableRecord(Exception):  # noqa: N818
    """A record that cannot be read. The text is for the operator, and holds no tokens."""


class UnsupportedRecord(UnusableRecord):
    """A record of a version that this release does not read."""


class UndecryptableRecord(UnusableRecord):
    """An encrypted record whose key is missing, or that was changed."""


class MalformedRecord(UnusableRecord):
    """A record of which something has been changed or written that no scheduler writes."""


class IncompleteRecord(UnusableRecord):
    """A record of which the store has lost tokens or log-probabilities that it had acknowledged."""


@dataclass(frozen=True, slots=True)
class Write:
    """New tokens of one sequence of a submission, from `offset` on, and its end where it has ended.

    Writing the same tokens again changes nothing, and another submission's record is not changed. With `truncates`
    everything beyond these tokens is removed, including an end. `logprobs`, one for each token or None where they were
    not requested, and `end` are serialized messages. A `fingerprint` becomes the record's, unless it is empty.

    A write of the first sequence has the new log-probabilities of the prompt, from number `prompt_offset` on, also
    serialized. Those that the store has are not changed. `key_id` is as in the log.
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
    prompt_offset: int = 0
    prompt_logprobs: Sequence[bytes] = ()
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when (seconds since 1970) a submission ended. Another submission's record is not changed.

    Nor is this one's where a write of the same batch left a gap: a record that has ended is complete.

    The record is kept for `kept_seconds` from this call on, at most for the store's TTL. 0: for the store's grace, or
    for `most_kept_seconds` if that is less; None: for its TTL.

    One that `is_withdrawn` is not recorded in the next minute: a call of `put` for it may arrive after this one.
    """

    key: str
    submission_id: str
    state: State
    at: float
    failure: scheduler_v1.FailureReason | None = None
    kept_seconds: int | None = None
    most_kept_seconds: int | None = None
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class PromptCharge:
    """What a submission's account has paid for its prompt, in tokens. Another submission's record is not changed."""

    key: str
    submission_id: str
    num_tokens: int


class BucketKind(StrEnum):
    """What an account has a bucket of."""

    TOKENS = "tokens"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class Spent:
    """What an account has spent of the leases of one term."""

    account: str
    term: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BucketCall:
    """A call for an account's bucket, which holds one minute's tokens, or `least` if that is more.

    `returned` tokens are put into the bucket, and then up to `most` are taken, if it has `least`. `spent` is what the
    account has spent in this term. Repeating a call with the same `term` and `number` has no further effect. A later
    call has a higher number.
    """

    kind: BucketKind
    account: str
    term: str
    number: int
    per_minute: int
    most: int
    least: int
    returned: int = 0
    spent: int = 0


class BucketAnswer(NamedTuple):
    """How many tokens were taken; or how many seconds it takes until the bucket has enough."""

    num_taken: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A write, by its index in the batch, that was not done: it began beyond the tokens or log-probabilities of the
    prompt, that the store has.

    `num_tokens` is how many tokens the store has of the sequence; None: there is no record of the submission.
    """

    index: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class KeyTaken:
    """A submission whose record, and with it anything else of it, was not written: another submission has its key."""

    key: str
    submission_id: str


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """The updates since the last batch. Records are written first, without tokens.

    A submission's own record is not changed. Another submission's record is kept if it has finished, or is live and has
    tokens: a request that ran under its name while the store was away must not replace output that clients may resume.
    Otherwise it is replaced by one that was accepted at the same time or later.
    """

    records: list[RequestLog] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    prompt_charges: list[PromptCharge] = field(default_factory=list)
    spending: list[Spent] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing about any request."""
        return not (self.records or self.writes or self.endings or self.prompt_charges)


class Store(Protocol):
    """Records of requests, and the leader's lease.

    Every call raises StoreUnavailable where the store does not answer in time, and those with an epoch raise StaleEpoch
    where the store has seen a later one. Every key that is written has a TTL, renewed while its request is live.
    """

    @property
    def is_answering(self) -> bool:
        """Whether it answered the last call."""
        ...

    @property
    def num_restarts(self) -> int:
        """Grows whenever the store may have lost its latest writes, as after a restart."""
        ...

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        """Records an accepted request without its tokens, unless a record has its key.

        Returns that record, with all its tokens, or None where this one is recorded. Another submission's record has
        the key if it is live or finished, and this one's own record if it has tokens or has finished. Raises
        UnusableRecord where the record that has the key cannot be read, and DeletedSubmission where this submission
        was deleted or withdrawn in the last minute.
        """
        ...

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        """Writes a batch, in one call; returns what was not written. Must not be called concurrently."""
        ...

    async def read(self, key: str) -> RequestLog | None:
        """The record of a request with its tokens, all of them durable; None where there is none.

        Raises UnusableRecord.
        """
        ...

    async def delete(self, key: str, epoch: int) -> bool:
        """Removes the record of a request, if there is one; returns whether there was."""
        ...

    async def live(self) -> list[RequestLog]:
        """Every record whose request has not ended, in order of acceptance, without those that cannot be read."""
        ...

    async def renew(self, keys: Iterable[str], epoch: int) -> None:
        """Starts the TTL of live requests anew."""
        ...

    async def call_buckets(self, calls: Sequence[BucketCall]) -> list[BucketAnswer]:
        """Takes tokens out of buckets that all schedulers share, and that fill by the store's clock."""
        ...

    async def eviction_policy(self) -> str | None:
        """What the store does when its memory is full, as Redis names it; None where that cannot be read."""
        ...

    async def leader(self, timeout: float | None = None) -> str | None:
        """The holder of the lease, within `timeout` seconds. A store that refuses writes counts as unavailable."""
        ...

    async def take_lease(self, holder: str, seconds: float, above: int = 0, epoch: int | None = None) -> int | None:
        """Takes the lease where no other holder has it: returns a new epoch, higher than all earlier ones and `above`.

        None while another holder has the lease, or where `epoch` is given and another holder took a later one. A call
        that was not answered may be repeated. Raises EpochOutsideWindow where `above` is more than a day ahead of the
        store's and this process' clocks, or not below 2^53 - 1; a stored epoch like that is replaced.
        """
        ...

    async def keep_lease(self, holder: str, epoch: int, seconds: float) -> bool:
        """Renews the lease, also one that has expired. False where there has been a later epoch.

        The timeout is half the length of the lease, so that there is time to try again.
        """
        ...

    async def release_lease(self, holder: str) -> None:
        """Releases the lease."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...
