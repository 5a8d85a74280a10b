"""Copies the logs of requests to the store, behind the steps."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from scheduler_svc.request_log import RequestLog, SequenceLog
from scheduler_svc.store.base import Ending, Gap, KeyTaken, StaleEpoch, Store, StoreUnavailable, Write, WriteBatch

log = logging.getLogger("quire.scheduler")

SECONDS = Histogram(
    "quire_journal_seconds",
    "Time from a step's commit until the store has its tokens",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0),
)
GAPS = Counter("quire_journal_gaps", "Writes that began beyond what the store had, and were done anew")
DROPPED = Counter("quire_journal_dropped", "Requests that ended without the store's knowledge while it was unavailable")

# What gathered while the store was away must not make calls that take too long, here or in the store. Tokens weigh 1
# each, and as much again for each of their log-probabilities.
_MAX_WEIGHT = 1 << 14  # of one call
_MIN_WEIGHT = 1 << 9  # of one call, however often the store failed
_LOG_WEIGHT = 64  # of a log beside its tokens
_MAX_KEPT = 10_000  # requests that are over, kept for a store that fails
_MIN_INTERVAL = 0.05  # seconds from one call to the next, unless it is urgent: steps between them share one
_RETRY = 0.1  # seconds until a store that failed is asked again
_WATCH = 1.0  # seconds between looks whether a store that nothing is written to was started anew
_MAX_LAG = 2.0  # seconds behind the steps from which on it counts as degraded
_UNCONFIRMED_SECONDS = 5.0  # seconds after its end for which a request is written anew where the store may have lost it


@dataclass(slots=True)
class _PendingCall:
    """A batch on its way: of which logs, noted when, and of which sequences its parts are."""

    batch: WriteBatch = field(default_factory=WriteBatch)
    logs: dict[RequestLog, float] = field(default_factory=dict)
    places: list[tuple[RequestLog, int]] = field(default_factory=list)
    ended: list[RequestLog] = field(default_factory=list)
    unconfirmed: set[RequestLog] = field(default_factory=set)
    partial: set[RequestLog] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    room: int = _MAX_WEIGHT

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it that the store does not have."""
        return not (self.batch.records or self.batch.writes or self.batch.endings)


class Journal:
    """Writes for one term. `on_stale` is called once, when a later term has begun; then nothing more is written.

    `on_durable` is told of each sequence, by its place in its log, of which the store came to have more.
    """

    def __init__(
        self, store: Store, epoch: int, on_stale: Callable[[], None], on_durable: Callable[[RequestLog, int], None]
    ) -> None:
        self.epoch = epoch
        self._store = store
        self._on_stale = on_stale
        self._on_durable = on_durable
        self._pending: dict[RequestLog, float] = {}  # and when they came, the oldest first
        self._call: _PendingCall | None = None
        self._weight = _MAX_WEIGHT  # that a call may have: less after a failure
        self._truncated: set[tuple[RequestLog, int]] = set()
        self._is_stale = False
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()  # there is news that is not to wait for more of it
        self._writing = asyncio.Lock()
        # What is written again where the store may have lost it.
        self._live: dict[RequestLog, None] = {}
        self._ended: deque[tuple[float, RequestLog]] = deque()
        self._unconfirmed: set[RequestLog] = set()
        self._num_restarts = store.num_restarts

    def mark_changed(self, request: RequestLog) -> None:
        """A log has news, or is new. One whose key is another submission's is left alone."""
        if request.is_displaced:
            return
        if request.is_over:  # whoever reads it may leave now, and then nobody else knows how it ended
            self._urgent.set()
        if request in self._pending:
            return
        self._pending[request] = time.monotonic()
        self._wake.set()
        self._live[request] = None

    def truncate(self, request: RequestLog, index: int) -> None:
        """A sequence of a log has just been shortened: to be called before it grows again."""
        sequence = request.sequences[index]
        sequence.num_durable = min(sequence.num_durable, len(sequence.token_ids))
        sequence.is_end_durable = False
        if not request.is_displaced:
            self._truncated.add((request, index))
            self.mark_changed(request)

    @property
    def lag(self) -> float:
        """Seconds since the oldest news that the store does not have; 0 where it has everything."""
        oldest = self._pending if self._call is None else self._call.logs
        return time.monotonic() - next(iter(oldest.values())) if oldest else 0.0

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No call is under way, and none begins meanwhile: `epoch` may be raised."""
        async with self._writing:
            yield

    @property
    def is_degraded(self) -> bool:
        """Whether the store cannot be reached, or is far behind: what runs now might not outlive this scheduler."""
        return not self._store.is_answering or self.lag > _MAX_LAG

    async def run(self) -> None:
        """Write until cancelled, or until a later term has begun. What a failing store does not take is kept for it."""
        while not self._is_stale:
            if not self._wake.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH):
                        await self._wake.wait()
                self._requeue_after_restart()
            if not self._pending:
                self._wake.clear()
                continue
            due = time.monotonic() + _MIN_INTERVAL
            if await self._write():
                await self._gather(due - time.monotonic())
            else:
                await asyncio.sleep(_RETRY)

    async def _gather(self, seconds: float) -> None:
        """Let steps share the next call, unless there is news that is not to wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._urgent.wait()

    async def flush(self, timeout: float) -> bool:
        """Write what there is within `timeout` seconds, beside `run` or after it; whether the store has everything."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (self._is_done or self._is_stale):
                    if not await self._write():
                        await asyncio.sleep(_RETRY)
        return self._is_done

    @property
    def _is_done(self) -> bool:
        return not self._pending and self._call is None

    async def _write(self) -> bool:
        """One call, if there is news; whether the store took it."""
        async with self._writing:
            if self._is_stale or not self._pending:
                return True
            call = self._call = self._build_call()
            try:
                undone = [] if call.is_empty else await self._store.write(call.batch, self.epoch)
            except StaleEpoch:
                self._is_stale = True
                self._put_back(call)
                log.warning("a later term has begun: nothing more is written", extra={"epoch": self.epoch})
                self._on_stale()
                return True
            except StoreUnavailable:
                self._put_back(call)
                self._weight = max(_MIN_WEIGHT, self._weight // 2)
                return False
            except BaseException:  # cancelled: whoever flushes writes it again
                self._put_back(call)
                raise
            finally:
                self._call = None
            self._apply(call, undone)
            self._weight = min(_MAX_WEIGHT, 2 * self._weight)
            return True

    # A batch: made, taken in, or not.

    def _build_call(self) -> _PendingCall:
        call = _PendingCall(room=self._weight)
        for request, since in self._pending.items():
            if request.key in call.keys:
                continue  # the submission before it ends first, in a call of its own
            call.logs[request] = since
            call.keys.add(request.key)
            self._add(call, request)
            if call.room <= 0:
                break
        for request in call.logs:
            del self._pending[request]
        if self._pending:  # there is no room for it
            self._urgent.set()
        else:
            self._wake.clear()
            self._urgent.clear()
        return call

    def _add(self, call: _PendingCall, request: RequestLog) -> None:
        """As much of a log as there is room for: its end comes with the last of its tokens."""
        call.room -= _LOG_WEIGHT
        is_unconfirmed = request in self._unconfirmed
        if is_unconfirmed:
            self._unconfirmed.discard(request)
            call.unconfirmed.add(request)
        if is_unconfirmed or not request.is_recorded:
            call.batch.records.append(request)
            call.room -= len(request.submit.prompt_token_ids)
        is_search = request.submit.HasField("beam_search")  # its sequences come all at once
        is_whole = True
        for index, sequence in enumerate(request.sequences):
            place = (request, index)
            truncates = place in self._truncated
            if is_unconfirmed or truncates or _has_pending_updates(sequence):
                weight = _weight_of(sequence)
                limit = len(sequence.token_ids) if is_search else max(0, call.room) // weight
                is_whole = is_whole and len(sequence.token_ids) - sequence.num_durable <= limit
                self._truncated.discard(place)
                write = _write_of(request, index, truncates, limit)
                call.batch.writes.append(write)
                call.places.append(place)
                call.room -= weight * len(write.token_ids)
        if not is_whole:
            call.partial.add(request)
        elif request.is_over and (is_unconfirmed or not request.is_ending_durable):
            at = request.ended_at if request.ended_at is not None else time.time()
            ending = Ending(request.key, request.submit.submission_id, request.state, at, request.failure)
            call.batch.endings.append(ending)
            call.ended.append(request)

    def _put_back(self, call: _PendingCall) -> None:
        self._truncated.update(
            place for place, write in zip(call.places, call.batch.writes, strict=True) if write.truncates
        )
        self._unconfirmed |= call.unconfirmed
        self._mark_changed_again(call.logs)
        self._drop_oldest(_MAX_KEPT)

    def _apply(self, call: _PendingCall, undone: list[Gap | KeyTaken]) -> None:
        now = time.monotonic()
        if not call.is_empty:
            SECONDS.observe(now - next(iter(call.logs.values())))
        taken = {one.key for one in undone if isinstance(one, KeyTaken)}
        short = {one.place: one.num_tokens for one in undone if isinstance(one, Gap)}
        behind = {call.places[place][0] for place in short}
        for request in call.batch.records:
            request.is_recorded = True
        for request in call.ended:
            request.is_ending_durable = request not in behind
        for request in call.logs:
            if request.key in taken:
                self._displace(request)
        for place, (write, (request, index)) in enumerate(zip(call.batch.writes, call.places, strict=True)):
            if place in short:
                self._mark_lost(request, index, write, short[place])
            elif not request.is_displaced and (request, index) not in self._truncated:  # what was cut is written anew
                sequence, num_durable = request.sequences[index], write.offset + len(write.token_ids)
                if num_durable > sequence.num_durable or (write.end is not None and not sequence.is_end_durable):
                    sequence.num_durable, sequence.is_end_durable = num_durable, write.end is not None
                    self._on_durable(request, index)
        if short:
            GAPS.inc(len(short))
        again = behind | call.partial
        if again:
            self._urgent.set()
            self._mark_changed_again({request: since for request, since in call.logs.items() if request in again})
        self._forget_written(call.logs, now)

    def _displace(self, request: RequestLog) -> None:
        """Another submission has the key in the store, and keeps it: nothing more of this one is written."""
        request.is_displaced = True
        request.is_recorded = request.is_ending_durable = False
        self._forget(request)
        log.warning("a request is not recorded: its name is another one's", extra={"key": request.key})

    def _forget(self, request: RequestLog) -> None:
        self._pending.pop(request, None)
        self._live.pop(request, None)
        self._unconfirmed.discard(request)
        self._truncated.difference_update([(request, index) for index in range(len(request.sequences))])

    def _mark_changed_again(self, requests: dict[RequestLog, float]) -> None:
        """What is noted goes on being as old as it is."""
        for request, since in self._pending.items():
            requests.setdefault(request, since)
        self._pending = requests
        self._wake.set()

    def _mark_lost(self, request: RequestLog, index: int, write: Write, num_tokens: int | None) -> None:
        """The store has less than it had: only `num_tokens` of a sequence, or not even a record."""
        if write.truncates:
            self._truncated.add((request, index))
        if num_tokens is None:
            request.is_recorded = False
        for sequence in request.sequences if num_tokens is None else [request.sequences[index]]:
            sequence.num_durable = min(sequence.num_durable, num_tokens or 0)
            sequence.is_end_durable = False

    def _forget_written(self, requests: Iterable[RequestLog], now: float) -> None:
        """Forget what is over and written, unless the store may have lost it."""
        for request in requests:
            if request.is_over and request not in self._pending and request in self._live:
                del self._live[request]
                self._ended.append((now, request))
        self._requeue_after_restart()
        while self._ended and self._ended[0][0] < now - _UNCONFIRMED_SECONDS:
            self._ended.popleft()

    def _requeue_after_restart(self) -> None:
        if self._num_restarts == self._store.num_restarts:
            return
        self._num_restarts = self._store.num_restarts
        for request in [*self._live, *(request for _, request in self._ended)]:
            self.mark_changed(request)
            self._unconfirmed.add(request)
        self._ended.clear()

    def _drop_oldest(self, num_kept: int) -> None:
        """Of requests that are over and wait for the store, only the latest are kept."""
        if len(self._pending) <= num_kept:
            return
        over = [request for request in self._pending if request.is_over]
        for request in over[: max(0, len(over) - num_kept)]:
            self._forget(request)
            DROPPED.inc()


def _has_pending_updates(sequence: SequenceLog) -> bool:
    return len(sequence.token_ids) > sequence.num_durable or (sequence.end is not None and not sequence.is_end_durable)


def _weight_of(sequence: SequenceLog) -> int:
    """Of each of its tokens."""
    return 2 + len(sequence.logprobs[0].top) if sequence.logprobs else 1


def _write_of(request: RequestLog, index: int, truncates: bool, limit: int) -> Write:
    """At most `limit` tokens; what follows them waits for a write of its own, and so does the end."""
    sequence = request.sequences[index]
    offset = sequence.num_durable
    stop = min(offset + limit, len(sequence.token_ids))
    is_whole = stop == len(sequence.token_ids)
    return Write(
        request.key,
        request.submit.submission_id,
        index,
        offset,
        sequence.token_ids[offset:stop],
        [one.SerializeToString() for one in sequence.logprobs[offset:stop]] if sequence.logprobs else None,
        sequence.cached_tokens if offset == 0 else None,
        None if sequence.end is None or not is_whole else sequence.end.SerializeToString(),
        sequence.score if is_whole else None,
        truncates,
        request.fingerprint if offset == 0 else b"",
    )
