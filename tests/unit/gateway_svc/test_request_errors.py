"""Errors for rejections by the scheduler."""

from gateway_svc.request_errors import error_from_failed
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import Reason


def field_path(which: str, item_index: int | None = None) -> str:
    return which


def test_a_result_that_no_worker_computes_is_a_feature_that_is_not_supported() -> None:
    reason = scheduler_pb2.FAILURE_REASON_UNSUPPORTED_RESULT
    failed = scheduler_pb2.Failed(reason=reason, message="computes no embedding")
    error = error_from_failed(failed, field_path, "default")
    assert (error.reason, error.message, error.field) == (Reason.FEATURE_UNSUPPORTED, failed.message, "model")


def test_a_record_that_cannot_be_decrypted_is_lost() -> None:
    reason = scheduler_pb2.FAILURE_REASON_RECORD_UNDECRYPTABLE
    failed = scheduler_pb2.Failed(reason=reason, message="the request has a record with the key 'a'")
    error = error_from_failed(failed, field_path, "default")
    message = "the request's record cannot be decrypted: send it as a new request, under another name"
    assert (error.reason, error.message) == (Reason.REQUEST_LOST, message)


def test_a_request_that_the_store_cannot_take_has_the_reason_of_the_scheduler() -> None:
    reason = scheduler_pb2.FAILURE_REASON_STORE_DEGRADED
    failed = scheduler_pb2.Failed(reason=reason, message="requests of this key need the store")
    error = error_from_failed(failed, field_path, "default")
    assert (error.reason, error.message) == (Reason.STORE_DEGRADED, "requests of this key need the store")
