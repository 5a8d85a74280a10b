"""Copies the logs of requests to the store. No step waits for it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from scheduler_svc.journal_writes import has_pending_updates, num_pending_of_prompt, weight_of, weight_of_log, write_of
from scheduler_svc.request_log import RecordState, RequestLog
from scheduler_svc.spending import Spending
from scheduler_svc.store.base import Ending, Gap, KeyTaken, StaleEpoch, Store, StoreUnavailable, Write, WriteBatch

log = logging.getLogger("quire.scheduler")

SECONDS = Histogram(
    "quire_journal_seconds",
    "Time from a step's commit until the store has its tokens",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0),
)
GAPS = Counter("quire_journal_gaps", "Writes that began beyond what the store had, and were done anew")
DROPPED = Counter("quire_journal_dropped", "Requests that ended without the store's knowledge while it was unavailable")

# Updates that gathered while the store was away are split, so that no call takes too long, here or in the store. A
# token has weight 1, and 1 more for each of its log-probabilities; 8 bytes of other data have weight 1.
_MAX_WEIGHT = 1 << 14  # of one call
_MIN_WEIGHT = 1 << 9  # of one call, however often the store failed
_LOG_WEIGHT = 64  # of a log without its tokens
_MAX_KEPT = 1 << 24  # of all ended requests that are kept for a store that fails
_KEPT_LOG_WEIGHT = 1 << 10  # of one of them without its tokens and attachment
_MIN_INTERVAL = 0.05  # seconds from one call to the next, unless it is urgent: the steps between share a call
_RETRY = 0.1  # seconds until a call that failed is repeated
_WATCH = 1.0  # seconds between checks, while nothing is written, whether the store was restarted
_MAX_LAG = 2.0  # seconds of lag from which on the store counts as degraded
# Seconds after the end of a request, or a cut, in which the request, or the cut, is written again if the store was
# restarted.
_UNCONFIRMED_SECONDS = 5.0


@dataclass(slots=True)
class _PendingCall:
    """A batch that is being written: its logs, with the times of their changes, and the sequence of each write."""

    batch: WriteBatch = field(default_factory=WriteBatch)
    logs: dict[RequestLog, float] = field(default_factory=dict)
    sequences: list[tuple[RequestLog, int]] = field(default_factory=list)
    ended: list[RequestLog] = field(default_factory=list)
    unconfirmed: set[RequestLog] = field(default_factory=set)
    partial: set[RequestLog] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    room: int = _MAX_WEIGHT


class Journal:
    """Writes for one term. `on_stale` is called once, when a later term has begun; then nothing more is written.

    `on_durable` is called with a log and the index of a sequence of which the store has more than before.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        on_stale: Callable[[], None],
        on_durable: Callable[[RequestLog, int], None],
        spending: Spending,
    ) -> None:
        self.epoch = epoch
        self._store = store
        self._on_stale = on_stale
        self._on_durable = on_durable
        self._spending = spending
        self._pending: dict[RequestLog, float] = {}  # the times of their changes, oldest first
        self._call: _PendingCall | None = None
        self._weight = _MAX_WEIGHT  # the limit of a call: lower after a failure
        self._truncated: set[tuple[RequestLog, int]] = set()
        self._is_stale = False
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()  # there are updates that must not wait for others
        self._writing = asyncio.Lock()
        # Written again if the store may have lost them.
        self._live: dict[RequestLog, None] = {}
        self._ended: deque[tuple[float, RequestLog]] = deque()
        self._kept: dict[RequestLog, int] = {}  # weights of ended requests that waited when a write failed
        self._unconfirmed: set[RequestLog] = set()
        # Where sequences were truncated in the store: from where, and when, oldest first.
        self._cuts: dict[tuple[RequestLog, int], tuple[int, float]] = {}
        self._num_restarts = store.num_restarts

    def mark_changed(self, request: RequestLog) -> None:
        """A log has changed, or is new. One that may not be written is ignored."""
        if not request.is_writable:
            return
        if request.is_over:  # its gateways may leave now, and then only the store has its end
            self._urgent.set()
        if request in self._pending:
            return
        self._pending[request] = time.monotonic()
        self._wake.set()
        self._live[request] = None

    def awaits(self, request: RequestLog) -> bool:
        """Whether there is something of a log that the store does not have, and is to have."""
        return request in self._pending or (self._call is not None and request in self._call.logs)

    def keep(self, request: RequestLog) -> None:
        """A live request, of which the store may have everything: it is written again if the store may have lost it."""
        if request.is_durable:
            self._live[request] = None
        else:
            self.mark_changed(request)

    def truncate(self, request: RequestLog, index: int) -> None:
        """A sequence of a log was truncated. Must be called before it grows again."""
        sequence = request.sequences[index]
        sequence.lose(len(sequence.token_ids))
        if request.is_writable:
            self._truncated.add((request, index))
            self.mark_changed(request)

    async def remove(self, key: str) -> bool:
        """Removes the record with a key, and writes no more of its request; returns whether there was one.

        Raises StoreUnavailable and StaleEpoch, and then nothing changes.
        """
        async with self.paused():  # else a call in progress could write the record again
            was_recorded = await self._store.delete(key, self.epoch)
            for request in (*self._live, *(request for _, request in self._ended)):
                if request.key == key:
                    request.set_record(RecordState.DELETED)
                    self._forget(request)
            self._ended = deque((at, request) for at, request in self._ended if request.key != key)
        return was_recorded

    @property
    def lag(self) -> float:
        """Seconds since the oldest change that the store does not have; 0 where it has everything."""
        oldest = self._pending if self._call is None else self._call.logs
        return time.monotonic() - next(iter(oldest.values())) if oldest else 0.0

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No call is in progress within the block, so that `epoch` may be raised."""
        async with self._writing:
            yield

    @property
    def is_degraded(self) -> bool:
        """Whether the store cannot be reached, or lags: a request might not survive this scheduler."""
        return not self._store.is_answering or self.lag > _MAX_LAG

    async def run(self) -> None:
        """Writes until cancelled, or until a later term has begun. A failed write is repeated."""
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
        """Waits, so that several steps share the next call, unless there is an urgent update."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._urgent.wait()

    async def flush(self, timeout: float) -> bool:
        """Writes everything within `timeout` seconds, while `run` runs or after it; returns whether that is done."""
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
        """One call, if there are updates; returns whether it succeeded."""
        async with self._writing:
            if self._is_stale or not self._pending:
                return True
            call = self._call = self._build_call()
            try:
                undone = [] if call.batch.is_empty else await self._store.write(call.batch, self.epoch)
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
            except BaseException:  # cancelled: a flush writes it again
                self._put_back(call)
                raise
            finally:
                self._call = None
            self._apply(call, undone)
            self._weight = min(_MAX_WEIGHT, 2 * self._weight)
            return True

    # A batch: build, apply, put back.

    def _build_call(self) -> _PendingCall:
        call = _PendingCall(room=self._weight)
        for request, since in self._pending.items():
            if request.key in call.keys:
                continue  # the earlier submission's end is written first, in an earlier call
            call.logs[request] = since
            call.keys.add(request.key)
            self._add(call, request)
            if call.room <= 0:
                break
        self._spending.add_to(call.batch, call.logs)
        for request in call.logs:
            del self._pending[request]
        if self._pending:  # the call has no room for them
            self._urgent.set()
        else:
            self._wake.clear()
            self._urgent.clear()
        return call

    def _add(self, call: _PendingCall, request: RequestLog) -> None:
        """Adds as much of a log as there is room for. Its end is written with the last of its tokens."""
        call.room -= _LOG_WEIGHT
        is_unconfirmed = request in self._unconfirmed
        if is_unconfirmed:
            self._unconfirmed.discard(request)
            call.unconfirmed.add(request)
        if is_unconfirmed or not request.is_recorded:
            call.batch.records.append(request)
            call.room -= len(request.submit.prompt_token_ids) + len(request.submit.attachment) // 8
        is_whole = True
        for index, sequence in enumerate(request.sequences):
            num_prompt = num_pending_of_prompt(request, index)
            if is_unconfirmed or (request, index) in self._truncated or num_prompt or has_pending_updates(sequence):
                is_whole = self._add_write(call, request, index, num_prompt) and is_whole
        if not is_whole:
            call.partial.add(request)
        elif request.is_over and (is_unconfirmed or request.record is not RecordState.COMPLETE):
            at = request.ended_at if request.ended_at is not None else time.time()
            ending = Ending(
                request.key,
                request.submit.submission_id,
                request.state,
                at,
                request.failure,
                request.kept_seconds,
                request.most_kept_seconds,
                request.is_withdrawn,
            )
            call.batch.endings.append(ending)
            call.ended.append(request)

    def _add_write(self, call: _PendingCall, request: RequestLog, index: int, num_prompt: int) -> bool:
        """Adds as much of a sequence as there is room for, the prompt's log-probabilities first; returns whether that
        is all.
        """
        written, sequence = (request, index), request.sequences[index]
        prompt_weight, weight = weight_of(request.prompt_logprobs), weight_of(sequence.logprobs)
        prompt_limit = min(num_prompt, max(0, call.room) // prompt_weight)
        call.room -= prompt_weight * prompt_limit
        limit = max(0, call.room) // weight if prompt_limit == num_prompt else 0
        if request.submit.HasField("beam_search"):
            limit = len(sequence.token_ids)  # its sequences are written whole
        is_whole = prompt_limit == num_prompt and len(sequence.token_ids) - sequence.num_durable <= limit
        write = write_of(request, index, written in self._truncated, limit, prompt_limit, is_whole=is_whole)
        self._truncated.discard(written)
        call.batch.writes.append(write)
        call.sequences.append(written)
        call.room -= weight * len(write.token_ids) + len(write.end or b"") // 8  # an end may be a vector
        return is_whole

    def _put_back(self, call: _PendingCall) -> None:
        self._truncated.update(
            written for written, write in zip(call.sequences, call.batch.writes, strict=True) if write.truncates
        )
        self._unconfirmed |= call.unconfirmed
        self._mark_changed_again(call.logs)
        self._drop_oldest()

    def _apply(self, call: _PendingCall, undone: list[Gap | KeyTaken]) -> None:
        now = time.monotonic()
        self._kept.clear()
        if not call.batch.is_empty:
            SECONDS.observe(now - next(iter(call.logs.values())))
            self._spending.note_written(call.batch, call.logs)
        taken = {one.key for one in undone if isinstance(one, KeyTaken)}
        short = {one.index: one.num_tokens for one in undone if isinstance(one, Gap)}
        incomplete = {call.sequences[number][0] for number in short}
        for request in call.batch.records:
            if not request.is_recorded:
                request.set_record(RecordState.RECORDED)
        for request in call.ended:
            has_ending = request.is_over and request not in incomplete  # it may be live again meanwhile
            request.set_record(RecordState.COMPLETE if has_ending else RecordState.RECORDED)
        for request in call.logs:
            if request.key in taken:
                self._displace(request)
        for number, (write, (request, index)) in enumerate(zip(call.batch.writes, call.sequences, strict=True)):
            if number in short:
                self._mark_lost(request, index, write, short[number])
                continue
            if request.record is RecordState.DISPLACED:
                continue
            if write.truncates:
                first, _ = self._cuts.pop((request, index), (write.offset, now))
                self._cuts[request, index] = min(first, write.offset), now
            if index == 0:
                num_prompt = write.prompt_offset + len(write.prompt_logprobs)
                request.num_prompt_logprobs_durable = max(request.num_prompt_logprobs_durable, num_prompt)
            if (request, index) not in self._truncated:  # else it is written again
                sequence, num_durable = request.sequences[index], write.offset + len(write.token_ids)
                if num_durable > sequence.num_durable or (write.end is not None and not sequence.is_end_durable):
                    sequence.num_durable, sequence.is_end_durable = num_durable, write.end is not None
                    self._on_durable(request, index)
        if short:
            GAPS.inc(len(short))
        again = {request for request in incomplete | call.partial if request.is_writable}
        if again:
            self._urgent.set()
            self._mark_changed_again({request: since for request, since in call.logs.items() if request in again})
        self._forget_written(call.logs, now)

    def _displace(self, request: RequestLog) -> None:
        """Another submission has the key in the store: nothing more of this one is written."""
        request.set_record(RecordState.DISPLACED)
        self._forget(request)
        log.warning("a request is not recorded: another one has its name", extra={"key": request.key})

    def _forget(self, request: RequestLog) -> None:
        self._pending.pop(request, None)
        self._live.pop(request, None)
        self._unconfirmed.discard(request)
        self._truncated.difference_update([(request, index) for index in range(len(request.sequences))])

    def _mark_changed_again(self, requests: dict[RequestLog, float]) -> None:
        """Puts logs back with the times of their changes."""
        for request, since in self._pending.items():
            requests.setdefault(request, since)
        self._pending = requests
        self._wake.set()

    def _mark_lost(self, request: RequestLog, index: int, write: Write, num_tokens: int | None) -> None:
        """The store has lost tokens: it has only `num_tokens` of a sequence, or, with None, no record."""
        if write.truncates:
            self._truncated.add((request, index))
        if num_tokens is None and request.record is not RecordState.DISPLACED:
            request.set_record(RecordState.UNRECORDED)
        request.num_prompt_logprobs_durable = 0
        for sequence in request.sequences if num_tokens is None else [request.sequences[index]]:
            sequence.lose(num_tokens or 0)

    def _forget_written(self, requests: Iterable[RequestLog], now: float) -> None:
        """Drops logs that have ended and are durable, once the store can no longer have lost them."""
        for request in requests:
            if request.is_over and request not in self._pending and request in self._live:
                del self._live[request]
                self._ended.append((now, request))
        self._requeue_after_restart()
        while self._ended and self._ended[0][0] < now - _UNCONFIRMED_SECONDS:
            self._ended.popleft()
        while self._cuts and next(iter(self._cuts.values()))[1] < now - _UNCONFIRMED_SECONDS:
            del self._cuts[next(iter(self._cuts))]

    def _requeue_after_restart(self) -> None:
        if self._num_restarts == self._store.num_restarts:
            return
        self._num_restarts = self._store.num_restarts
        for request in [*self._live, *(request for _, request in self._ended)]:
            if request.is_writable:
                self.mark_changed(request)
                self._unconfirmed.add(request)
        self._ended.clear()
        for (request, index), (offset, _) in self._cuts.items():
            if request in self._unconfirmed:  # the store may have the tokens from before the cut again
                request.sequences[index].lose(offset)
                self._truncated.add((request, index))
        self._cuts.clear()

    def _drop_oldest(self) -> None:
        """Keeps only the latest of the ended requests that wait for the store, as far as their weight allows."""
        over = [request for request in self._pending if request.is_over]
        self._kept = {each: self._kept.get(each) or _KEPT_LOG_WEIGHT + weight_of_log(each) for each in over}
        excess = sum(self._kept.values()) - _MAX_KEPT
        for request in over:
            if excess <= 0:
                break
            excess -= self._kept.pop(request)
            self._forget(request)
            DROPPED.inc()
