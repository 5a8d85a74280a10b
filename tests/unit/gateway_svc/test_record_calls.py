"""Calls about records wait for their answers, also over sessions."""

import asyncio
import itertools

import pytest

from gateway_svc import record_calls
from gateway_svc.record_calls import RecordCalls
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.errors import QuireError, Reason


class Session:
    """What was sent, and the calls."""

    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[scheduler_v1.SessionRequest] = []
        self.calls = RecordCalls(self._send, itertools.count(1))

    def fail(self, reason: scheduler_v1.FailureReason) -> None:
        """Answers the latest command, whose id is its number."""
        failed = scheduler_v1.Failed(reason=reason, message="why")
        assert self.calls.handle(scheduler_v1.Event(key="k", failed=failed, command_id=self._id))

    def answer(self, **kind: object) -> None:
        assert self.calls.handle(scheduler_v1.Event(key="k", command_id=self._id, **kind))  # type: ignore[arg-type]

    def _send(self, command: scheduler_v1.SessionRequest) -> bool:
        if self.is_open:
            self.sent.append(command)
        return self.is_open

    @property
    def _id(self) -> int:
        command = self.sent[-1]
        return command.lookup.command_id or command.delete.command_id


async def test_a_record_is_the_answer_to_its_own_call() -> None:
    session = Session()
    calls = [asyncio.create_task(session.calls.look_up(f"key {number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert [command.lookup.key for command in session.sent] == ["key 0", "key 1"]
    for number in (1, 0):
        command = session.sent[number].lookup
        record = scheduler_v1.Record(attachment=command.key.encode())
        event = scheduler_v1.Event(key=command.key, record=record, command_id=command.command_id)
        assert session.calls.handle(event)
    assert [(await call).attachment for call in calls] == [b"key 0", b"key 1"]
    assert not session.calls.is_waiting


async def test_events_of_other_calls_are_not_taken() -> None:
    session = Session()
    call = asyncio.create_task(session.calls.look_up("k"))
    await asyncio.sleep(0)
    assert not session.calls.handle(scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens()))
    assert not session.calls.handle(scheduler_v1.Event(key="k", accepted=scheduler_v1.Accepted(), command_id=7))
    session.answer(record=scheduler_v1.Record())
    await call


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST, Reason.REQUEST_UNKNOWN),
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, Reason.CAPACITY_EXHAUSTED),
        (scheduler_v1.FAILURE_REASON_RECORD_UNDECRYPTABLE, Reason.REQUEST_LOST),
    ],
)
async def test_a_refusal_is_the_error(reason: scheduler_v1.FailureReason, expected: Reason) -> None:
    session = Session()
    for method in (session.calls.look_up, session.calls.delete):
        call = asyncio.create_task(method("k"))
        await asyncio.sleep(0)
        session.fail(reason)
        with pytest.raises(QuireError) as error:
            await call
        assert error.value.reason is expected


async def test_a_call_is_repeated_in_the_next_session() -> None:
    session = Session()
    call = asyncio.create_task(session.calls.look_up("k"))
    await asyncio.sleep(0)
    session.calls.open(3)
    assert session.sent[0] == session.sent[1]
    session.answer(record=scheduler_v1.Record(attachment=b"found"))
    assert (await call).attachment == b"found"


async def test_a_repeated_deletion_that_finds_nothing_has_succeeded() -> None:
    session = Session()
    call = asyncio.create_task(session.calls.delete("k"))
    await asyncio.sleep(0)
    session.calls.open(3)
    session.fail(scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)
    await call


async def test_a_deletion_that_no_session_had_is_no_repetition() -> None:
    session = Session()
    session.is_open = False
    call = asyncio.create_task(session.calls.delete("k"))
    await asyncio.sleep(0)
    session.is_open = True
    session.calls.open(3)
    session.fail(scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)
    with pytest.raises(QuireError) as error:
        await call
    assert error.value.reason is Reason.REQUEST_UNKNOWN


async def test_a_scheduler_of_the_release_before_is_not_asked() -> None:
    session = Session()
    session.calls.open(2)
    with pytest.raises(QuireError, match="release") as error:
        await session.calls.look_up("k")
    assert error.value.reason is Reason.CAPACITY_EXHAUSTED
    assert session.sent == []


async def test_a_call_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_calls, "_TIMEOUT_SECONDS", 0.01)
    session = Session()
    with pytest.raises(QuireError, match="answered"):
        await session.calls.look_up("k")
    assert not session.calls.is_waiting
