"""The errors of requests, as clients receive them."""

import logging
import sys
import uuid

from gateway_svc.field_paths import Field, FieldPath
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_seconds
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

RETRY_AFTER_SECONDS = 1.0

# The field that a scheduler's refusal is about.
_FIELDS = {
    scheduler_pb2.FAILURE_REASON_KEY_IN_USE: Field.REQUEST_ID,
    scheduler_pb2.FAILURE_REASON_UNSUPPORTED_RESULT: Field.MODEL,
    scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE: Field.BEAM_WIDTH,
    scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS: Field.MAX_TOKENS,
    scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: Field.MAX_TOKENS,
    scheduler_pb2.FAILURE_REASON_PROMPT_TOO_COSTLY: Field.PROMPT,
}


def error_from_failed(failed: scheduler_pb2.Failed, field_path: FieldPath, tenant: str) -> QuireError:
    """The error for a scheduler's failure of a tenant's request, with fields as its client spells them."""
    hint = to_seconds(failed.retry_after) if failed.HasField("retry_after") else None
    soon = RETRY_AFTER_SECONDS if hint is None else hint
    about = _FIELDS.get(failed.reason)
    field = None if about is None else field_path(about)
    match failed.reason:
        case scheduler_pb2.FAILURE_REASON_KEY_IN_USE:
            return QuireError(Reason.IDEMPOTENCY_KEY_REUSED, "is the name of another request", field)
        case scheduler_pb2.FAILURE_REASON_DEADLINE_EXCEEDED:
            return deadline_exceeded()
        case scheduler_pb2.FAILURE_REASON_CANCELLED:
            return cancelled()
        case (
            scheduler_pb2.FAILURE_REASON_INVALID
            | scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE
            | scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS
            | scheduler_pb2.FAILURE_REASON_PROMPT_TOO_COSTLY
        ):
            return QuireError(Reason.INVALID_FIELD, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_UNSUPPORTED_RESULT:
            return QuireError(Reason.FEATURE_UNSUPPORTED, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_GRAMMAR_TOO_COMPLEX:
            return QuireError(Reason.GRAMMAR_TOO_COMPLEX, failed.message)
        case scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED:
            return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_UNAVAILABLE:
            return unavailable("the request cannot be served now", soon)
        case scheduler_pb2.FAILURE_REASON_TENANT_OVER_QUOTA:
            subject = f"tenant:{tenant}"
            return QuireError(Reason.TENANT_QUOTA_EXCEEDED, failed.message, retry_after=soon, subject=subject)
        case scheduler_pb2.FAILURE_REASON_DEADLINE_INFEASIBLE:
            # Without a hint no later attempt could meet this deadline.
            return QuireError(Reason.DEADLINE_TOO_SHORT, failed.message, retry_after=hint)
        case scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
            return unknown()
        case scheduler_pb2.FAILURE_REASON_QUARANTINED:
            message = "workers died whenever they ran the request: it is not tried again"
            return QuireError(Reason.REQUEST_QUARANTINED, message)
        case scheduler_pb2.FAILURE_REASON_RECORD_INCOMPLETE:
            return QuireError(Reason.REQUEST_LOST, "a part of the request's output was lost: send it as a new request")
        case scheduler_pb2.FAILURE_REASON_RECORD_UNDECRYPTABLE:
            message = "the request's record cannot be decrypted: send it as a new request, under another name"
            return QuireError(Reason.REQUEST_LOST, message)
        case scheduler_pb2.FAILURE_REASON_STORE_DEGRADED:
            message = failed.message or "requests cannot be recorded now"
            return QuireError(Reason.STORE_DEGRADED, message, retry_after=soon)
    return internal(failed.message or f"reason {failed.reason}")


def internal(message: str) -> QuireError:
    """An internal error. The client receives an id that is in the log."""
    error_id = uuid.uuid4().hex
    logger.error("request failed", extra={"error_id": error_id, "why": message}, exc_info=sys.exception())
    return QuireError(Reason.INTERNAL, f"internal error {error_id}")


def unknown() -> QuireError:
    return QuireError(Reason.REQUEST_UNKNOWN, "no such request runs, or ran lately")


def cancelled() -> QuireError:
    return QuireError(Reason.CANCELLED, "the request was cancelled")


def deadline_exceeded() -> QuireError:
    return QuireError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the request was done")


def model_not_ready(name: str) -> QuireError:
    message = f"the model {name} is not ready"
    return QuireError(Reason.MODEL_NOT_READY, message, retry_after=RETRY_AFTER_SECONDS)


def no_model_ready() -> QuireError:
    return QuireError(Reason.MODEL_NOT_READY, "no model is ready", retry_after=RETRY_AFTER_SECONDS)


def model_missing(name: str) -> QuireError:
    """The request exists, and this gateway does not have its model; another gateway may."""
    message = f"this gateway does not serve the model of the request, {name}"
    return QuireError(Reason.MODEL_NOT_READY, message, retry_after=RETRY_AFTER_SECONDS)


def unavailable(message: str, retry_after: float = RETRY_AFTER_SECONDS) -> QuireError:
    """A later attempt may succeed."""
    return QuireError(Reason.CAPACITY_EXHAUSTED, message, retry_after=retry_after)
