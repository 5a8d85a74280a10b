"""The store in Redis 6.2 or later."""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import (
    BucketAnswer,
    BucketCall,
    Ending,
    Gap,
    KeyTaken,
    StoreUnavailable,
    UnusableRecord,
    WriteBatch,
)
from scheduler_svc.store.client import Argument, RedisClient, ServerHistory
from scheduler_svc.store.connection import RedisConnections, connect
from scheduler_svc.store.encryption import NO_KEYS, RecordKeys
from scheduler_svc.store.packing import (
    Page,
    RecordPages,
    pack_bucket_call,
    pack_ending,
    pack_record,
    pack_spending,
    pack_writes,
    unpack_log,
    unpack_written,
)
from scheduler_svc.store.scripts import StoreKeys
from svc_common.epochs import epoch_clock as _clock
from svc_common.redis_tls import NO_FILES, RedisTlsFiles
from svc_common.redis_url import DEFAULT_PREFIX, RedisTarget

log = logging.getLogger("quire.scheduler")

_FAIL_FAST = 0.2  # seconds after a failure in which calls fail at once
_EPOCH_TTL = 7 * 86400  # seconds; without a stored epoch the next one is still later, by the clock
_BUCKET_TTL = 86400  # seconds after its last use; a bucket is full after a minute, as a new one is
_DELETED_TTL = 60  # seconds; as long as a gateway waits for a scheduler by default
_CHUNK = 128  # records, or buckets, in one call
_READ_BYTES = 1 << 22  # in one answer with records: it must arrive within the timeout
_LARGE = 1 << 16  # bytes of a record from which on it is unpacked on a thread: it takes milliseconds
_MAX_READS = 5  # of a record that changes while it is read


class RedisStore:
    """Records in the Redis at `url`, kept for at most `ttl` seconds after their last renewal, or their end. One that is
    to be kept until its end is kept for `grace` seconds after that, for clients that lost their connections.

    Deployments that share a Redis differ in the `prefix` of their keys.
    """

    def __init__(
        self,
        url: str,
        ttl: int = 3600,
        prefix: str = DEFAULT_PREFIX,
        grace: float = 30.0,
        tls: RedisTlsFiles = NO_FILES,
        record_keys: RecordKeys = NO_KEYS,
    ) -> None:
        target = RedisTarget.parse(url)
        self._keys = StoreKeys.of(prefix)
        self._history = ServerHistory()
        # Neither new requests nor large batches delay the lease, and new requests do not delay the steps.
        self._records = self._client(connect(target, tls), "records", _FAIL_FAST)
        self._steps = self._client(connect(target, tls), "steps", _FAIL_FAST)
        # Its callers retry at their own interval.
        self._lease = self._client(connect(target, tls), "lease", 0)
        self._ttl = ttl
        self.record_keys = record_keys
        """May be replaced by keys that include those before."""
        self._grace = min(ttl, max(1, round(grace)))
        self._last_write = 0

    def _client(self, connections: RedisConnections, kind: str, fail_fast: float) -> RedisClient:
        return RedisClient(connections, self._keys, kind, self._history, fail_fast, self._hang_up)

    @property
    def is_answering(self) -> bool:
        return self._steps.is_answering and self._lease.is_answering

    @property
    def num_restarts(self) -> int:
        """Grows where a connection was lost, or the server does not have the script."""
        return self._history.num_restarts

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        keys = self._keys_for([log])
        record = pack_record(log, keys)
        return await self._record_from("put", epoch, _EPOCH_TTL, self._ttl, *record)

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        self._last_write = max(self._last_write + 1, _clock())
        rest: list[Argument] = []
        keys = self._keys_for(batch.records)
        for record in batch.records:
            rest += pack_record(record, keys)
        for ending in batch.endings:
            rest += pack_ending(ending, self._ttl_after(ending), _DELETED_TTL)
        reply = await self._steps.evaluate(
            "write",
            epoch,
            _EPOCH_TTL,
            self._ttl,
            self._last_write,
            len(batch.records),
            pack_writes(batch.writes, keys),
            pack_spending(batch),
            *rest,
        )
        return unpack_written(reply)

    def _keys_for(self, new: Iterable[RequestLog]) -> RecordKeys:
        """The keys now. New records keep the one that they are encrypted with, whatever keys come later."""
        keys = self.record_keys
        for log in new:
            if log.key_id is None:
                log.key_id = keys.newest
        return keys

    def _ttl_after(self, ending: Ending) -> int:
        if ending.kept_seconds is None:
            return self._ttl
        if ending.kept_seconds:
            return min(ending.kept_seconds, self._ttl)
        return min(self._grace, ending.most_kept_seconds or self._grace)

    async def read(self, key: str) -> RequestLog | None:
        return await self._record_from("read", key, 0, 0, is_patient=True)

    async def _record_from(self, function: str, *arguments: Argument, is_patient: bool = False) -> RequestLog | None:
        """The record whose first page a function of the script returns."""
        for _ in range(_MAX_READS):
            page = await self._records.evaluate(function, *arguments, is_patient=is_patient)
            if page is None or (found := await self._rest_of(page)) is not None:
                return None if page is None else found
        raise StoreUnavailable("a record changes while it is read")

    async def _rest_of(self, first: Page) -> RequestLog | None:
        """The record that begins with a page; None where it changed before its last page was read.

        Raises UnusableRecord.
        """
        pages = RecordPages(first)
        while pages.next is not None:
            pages.add(await self._records.evaluate("read", pages.key, *pages.next, is_patient=True))
        if pages.has_changed:
            return None
        if pages.num_bytes < _LARGE:
            return unpack_log(pages, self.record_keys)
        return await asyncio.to_thread(unpack_log, pages, self.record_keys)

    async def delete(self, key: str, epoch: int) -> bool:
        call_id = uuid.uuid4().hex  # the call is repeated where its connection breaks
        return bool(await self._records.evaluate("delete", epoch, _EPOCH_TTL, key, _DELETED_TTL, call_id))

    async def live(self) -> list[RequestLog]:
        logs: list[RequestLog] = []
        keys = sorted(await self._records.members(self._keys.live))
        while keys:
            num_read, pages = await self._records.evaluate("read_live", _READ_BYTES, *keys[:_CHUNK])
            del keys[:num_read]
            for page in pages:
                await asyncio.sleep(0)  # decrypting them takes long, and the lease is renewed meanwhile
                try:
                    found = await self._rest_of(page) or await self._record_from("read", page[1], 0, 0)
                except UnusableRecord as error:
                    log.error("a request is not taken over", extra={"why": str(error)})
                    continue
                if found is not None and found.state is State.ACCEPTED:
                    logs.append(found)
        return sorted(logs, key=lambda log: log.accepted_at)

    async def renew(self, keys: Iterable[str], epoch: int) -> None:
        for chunk in _chunks(keys):
            await self._records.evaluate("renew", epoch, _EPOCH_TTL, self._ttl, *chunk)

    async def call_buckets(self, calls: Sequence[BucketCall]) -> list[BucketAnswer]:
        answers: list[BucketAnswer] = []
        for chunk in _chunks(calls):
            arguments = [argument for call in chunk for argument in pack_bucket_call(call)]
            reply = await self._records.evaluate("call_buckets", _BUCKET_TTL, *arguments)
            answers += [BucketAnswer(taken, ms / 1000) for taken, ms in zip(reply[::2], reply[1::2], strict=True)]
        return answers

    async def eviction_policy(self) -> str | None:
        return await self._records.eviction_policy()

    async def leader(self, timeout: float | None = None) -> str | None:
        holder: bytes | None = await self._lease.evaluate("leader", timeout=timeout)
        return None if holder is None else holder.decode()

    async def take_lease(self, holder: str, seconds: float, above: int = 0, epoch: int | None = None) -> int | None:
        own_epoch = "" if epoch is None else epoch
        reply = await self._lease.evaluate(
            "take_lease", holder, _milliseconds(seconds), above, own_epoch, _EPOCH_TTL, _clock()
        )
        return None if reply is None else int(reply)

    async def keep_lease(self, holder: str, epoch: int, seconds: float) -> bool:
        reply = await self._lease.evaluate(
            "keep_lease", holder, _milliseconds(seconds), epoch, _EPOCH_TTL, timeout=seconds / 2
        )
        return bool(reply)

    async def release_lease(self, holder: str) -> None:
        await self._lease.evaluate("release_lease", holder)

    async def _hang_up(self) -> None:
        """A connection was lost. The others have probably broken too, which only their use would show: close them."""
        for client in (self._records, self._steps, self._lease):
            await client.hang_up()

    async def close(self) -> None:
        """Closes the connections."""
        for client in (self._records, self._steps, self._lease):
            await client.close()


def _chunks(keys: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(keys)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
