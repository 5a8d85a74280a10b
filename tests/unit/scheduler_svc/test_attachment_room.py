"""The memory that attachments may take."""

from request_logs import request_log
from scheduler_svc.attachment_room import AttachmentRoom
from scheduler_svc.core.events import Failure
from scheduler_svc.request_log import RequestLog


def log_of(tenant: str, num_bytes: int) -> RequestLog:
    log = request_log()
    log.submit.tenant = tenant
    log.submit.attachment = bytes(num_bytes)
    return log


def test_requests_without_an_attachment_need_no_room() -> None:
    room = AttachmentRoom(1)
    assert room.admit(log_of("one", 1)) is None
    assert room.admit(log_of("one", 0)) is None


def test_all_attachments_have_a_bound() -> None:
    room = AttachmentRoom(100)
    first = log_of("one", 60)
    assert room.admit(first) is None
    refusal = room.admit(log_of("two", 41))
    assert refusal is not None
    assert (refusal.failure, refusal.retry_after) == (Failure.UNAVAILABLE, 5.0)
    room.release(first)
    room.release(first)
    assert room.admit(log_of("two", 100)) is None


def test_a_tenant_leaves_some_room_for_others() -> None:
    room = AttachmentRoom(90)
    refusals = [room.admit(log_of("one", 10)) for _ in range(9)]
    assert refusals[:8] == [None] * 8
    assert refusals[8] is not None
    assert refusals[8].failure is Failure.TENANT_OVER_QUOTA
    assert room.admit(log_of("two", 10)) is None


def test_what_was_accepted_before_is_held_without_room() -> None:
    room = AttachmentRoom(10)
    before = log_of("one", 30)
    room.hold(before)
    room.hold(before)
    assert room.admit(log_of("two", 1)) is not None
    room.release(before)
    assert room.admit(log_of("two", 10)) is None
