"""What clients are told of a scheduler's verdicts, and of having none."""

import logging
import sys
import uuid

from gateway_svc.field_paths import Field, FieldPath
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_seconds
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

RETRY_AFTER_SECONDS = 1.0

# What of a request a scheduler's refusal is about.
_FIELDS = {
    scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE: Field.BEAM_WIDTH,
    scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS: Field.MAX_TOKENS,
    scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: Field.MAX_TOKENS,
}


def error_from_failed(failed: scheduler_pb2.Failed, field_path: FieldPath, tenant: str) -> QuireError:
    """A scheduler's verdict on a tenant's request, with fields as its client spells them."""
    hint = to_seconds(failed.retry_after) if failed.HasField("retry_after") else None
    soon = RETRY_AFTER_SECONDS if hint is None else hint
    about = _FIELDS.get(failed.reason)
    field = None if about is None else field_path(about)
    match failed.reason:
        case scheduler_pb2.FAILURE_REASON_KEY_IN_USE:
            return QuireError(Reason.IDEMPOTENCY_KEY_REUSED, "another request has this request_id")
        case scheduler_pb2.FAILURE_REASON_DEADLINE_EXCEEDED:
            return deadline_exceeded()
        case scheduler_pb2.FAILURE_REASON_CANCELLED:
            return cancelled()
        case (
            scheduler_pb2.FAILURE_REASON_INVALID
            | scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE
            | scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS
        ):
            return QuireError(Reason.INVALID_FIELD, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED:
            return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_UNAVAILABLE:
            return unavailable("there is no capacity for the request now", soon)
        case scheduler_pb2.FAILURE_REASON_TENANT_OVER_QUOTA:
            subject = f"tenant:{tenant}"
            return QuireError(Reason.TENANT_QUOTA_EXCEEDED, failed.message, retry_after=soon, subject=subject)
        case scheduler_pb2.FAILURE_REASON_DEADLINE_INFEASIBLE:
            # Without a hint there is no later at which this deadline would do.
            return QuireError(Reason.DEADLINE_TOO_SHORT, failed.message, retry_after=hint)
        case scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
            return unknown()
        case scheduler_pb2.FAILURE_REASON_QUARANTINED:
            message = "workers died whenever they ran the request: it is not tried again"
            return QuireError(Reason.REQUEST_QUARANTINED, message)
        case scheduler_pb2.FAILURE_REASON_STORE_DEGRADED:
            return QuireError(Reason.STORE_DEGRADED, "requests cannot be recorded now", retry_after=soon)
    return internal(failed.message or f"reason {failed.reason}")


def internal(message: str) -> QuireError:
    """A fault of ours: the client gets an id that leads to the log."""
    error_id = uuid.uuid4().hex
    logger.error("request failed", extra={"error_id": error_id, "why": message}, exc_info=sys.exception())
    return QuireError(Reason.INTERNAL, f"internal error {error_id}")


def unknown() -> QuireError:
    """There is nothing to go on with."""
    return QuireError(Reason.REQUEST_UNKNOWN, "no such request runs, or ran lately")


def cancelled() -> QuireError:
    """It was cancelled by name."""
    return QuireError(Reason.CANCELLED, "the request was cancelled")


def deadline_exceeded() -> QuireError:
    """Its time is over."""
    return QuireError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the request was done")


def unavailable(message: str, retry_after: float = RETRY_AFTER_SECONDS) -> QuireError:
    """It may do later."""
    return QuireError(Reason.CAPACITY_EXHAUSTED, message, retry_after=retry_after)
