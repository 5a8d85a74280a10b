"""The memory that attachments of requests take in a scheduler: bounded in all, and shared by tenants."""

from collections import Counter

from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure
from scheduler_svc.request_log import RequestLog

MAX_BYTES = 2**30
_TENANT_SHARE = 8  # a tenant may hold this many times as much as is free
_RETRY_SECONDS = 5.0


class AttachmentRoom:
    """Counts the attachments of requests that this scheduler keeps in memory."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: set[RequestLog] = set()
        self.num_bytes = 0
        """Bytes that are held."""
        self._num_of_tenant: Counter[str] = Counter()

    def admit(self, log: RequestLog) -> AdmissionRefusal | None:
        """Holds a new request's attachment, or returns why there is no room for it."""
        num_bytes, tenant = len(log.submit.attachment), log.submit.tenant
        if not num_bytes:
            return None
        num_free = self._max_bytes - self.num_bytes
        if num_bytes > num_free:
            return AdmissionRefusal(Failure.UNAVAILABLE, _message(self.num_bytes, "all requests"), _RETRY_SECONDS)
        held = self._num_of_tenant[tenant]
        # What is free shrinks as tenants fill it, so some of it is left however many do.
        if held and held + num_bytes > _TENANT_SHARE * (num_free - num_bytes):
            return AdmissionRefusal(Failure.TENANT_OVER_QUOTA, _message(held, "this tenant's requests"), _RETRY_SECONDS)
        self.hold(log)
        return None

    def hold(self, log: RequestLog) -> None:
        """Holds a request's attachment, whether there is room or not: the request was accepted before."""
        if log.submit.attachment and log not in self._held:
            self._held.add(log)
            self._count(log, 1)

    def release(self, log: RequestLog) -> None:
        """The request is not in memory any more."""
        if log in self._held:
            self._held.remove(log)
            self._count(log, -1)

    def _count(self, log: RequestLog, sign: int) -> None:
        num_bytes = sign * len(log.submit.attachment)
        self.num_bytes += num_bytes
        self._num_of_tenant[log.submit.tenant] += num_bytes
        if not self._num_of_tenant[log.submit.tenant]:
            del self._num_of_tenant[log.submit.tenant]


def _message(num_bytes: int, whose: str) -> str:
    return f"attachments of {whose} take {num_bytes / 2**20:.0f} MiB in memory, and there is no room for this one"
