"""A call of a client, and what its API key says of its requests: whose they are, how they count, their priority."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context

from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import Share
from gateway_svc.tracing import Operation
from gateway_svc.validated_request import ValidatedRequest
from gateway_svc.validated_value import ValidatedValue
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason
from svc_common.keys import cache_salt


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client. `deadline` and `arrival_time` are on the monotonic clock, in seconds."""

    tenant: Tenant
    operation: Operation
    deadline: float | None = None
    parent: Context | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    chunk_per_token: bool = False
    """Its chunks are those of single tokens, however tokens arrive."""
    body: Share | None = None
    """The bytes of its body and of its prompts of pairs, which are freed when its requests are submitted."""

    def release_body(self) -> None:
        """Frees the bytes of its body, which nothing needs any longer."""
        if self.body is not None:
            self.body.release()


def counted_call(
    requests: Sequence[ValidatedRequest | ValidatedValue], tenant: Tenant
) -> scheduler_pb2.CountedCall | None:
    """What the requests of a call are a part of, where they count together for their account; None: each counts alone.

    Raises QuireError where the call has more than the key ever allows at once.
    """
    limits = tenant.limits
    if limits is None or len(requests) < 2:
        return None
    for name, most in (("requests_per_minute", limits.requests_per_minute), ("max_queued", limits.max_queued)):
        if most is not None and len(requests) > most:
            message = f"is one of {len(requests)} inputs, and {name} of the API key is {most}: a call may have no more"
            raise QuireError(Reason.INVALID_FIELD, message, field=requests[most].field_path(Field.PROMPT))
    if limits.requests_per_minute is None:
        return None
    return scheduler_pb2.CountedCall(id=uuid.uuid4().bytes, num_requests=len(requests))


def set_caller(
    submit: scheduler_pb2.Submit,
    tenant: Tenant,
    key: str,
    part_of: scheduler_pb2.CountedCall | None,
    client_salt: str = "",
) -> None:
    """Sets the fields of a Submit that say whose request it is. Only requests with the same `client_salt` share cached
    prefixes."""
    submit.key = key
    submit.tenant = tenant.name
    submit.weight = tenant.weight
    if tenant.limits is not None:
        submit.limits.CopyFrom(tenant.limits.to_proto())
    if part_of is not None:
        submit.call.CopyFrom(part_of)
    submit.cache_salt = cache_salt(tenant.name, client_salt)


def limit_priority(priority: int | None, tenant: Tenant, field_path: FieldPath) -> int | None:
    """Rejects a priority above that of the key. A request without one has 0, or the key's highest if that is lower."""
    most = tenant.max_priority
    if most is None:
        return priority
    if priority is None:
        return min(0, most)
    if priority > most:
        message = f"must be at most {most}, the highest priority that the API key allows"
        raise QuireError(Reason.INVALID_FIELD, message, field=field_path(Field.PRIORITY))
    return priority
