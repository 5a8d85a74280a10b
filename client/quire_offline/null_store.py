"""The store of a process that keeps no records: what dies with it needs none."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import BucketAnswer, BucketCall, Gap, KeyTaken, WriteBatch


class NullStore:
    """A Store (`scheduler_svc/store/base.py`) that always answers, has no record, and forgets what is written.

    There is one leader, so nothing takes its lease.
    """

    @property
    def is_answering(self) -> bool:
        return True

    @property
    def num_restarts(self) -> int:
        return 0

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        return None

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        return []

    async def read(self, key: str) -> RequestLog | None:
        return None

    async def delete(self, key: str, epoch: int) -> bool:
        return False

    async def live(self) -> list[RequestLog]:
        return []

    async def renew(self, keys: Iterable[str], epoch: int) -> None:
        pass

    async def call_buckets(self, calls: Sequence[BucketCall]) -> list[BucketAnswer]:
        return [BucketAnswer(call.most, 0.0) for call in calls]

    async def eviction_policy(self) -> str | None:
        return None

    async def leader(self, timeout: float | None = None) -> str | None:
        return None

    async def take_lease(self, holder: str, seconds: float, above: int = 0, epoch: int | None = None) -> NoReturn:
        raise AssertionError("the epoch of the one leader is fixed")

    async def keep_lease(self, holder: str, epoch: int, seconds: float) -> bool:
        return True

    async def release_lease(self, holder: str) -> None:
        pass

    async def close(self) -> None:
        pass
