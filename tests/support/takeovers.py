"""A scheduler whose place another one takes in mid-stream, for tests of a gateway's session."""

from gateway_sessions import RecordingReader, SessionClient, grown
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler


async def take_over(scheduler: ScriptedScheduler, successor: ScriptedScheduler) -> None:
    """Stops the first scheduler and starts the second."""
    scheduler.is_leader, successor.is_leader = False, True
    scheduler.session.close()
    await successor.joined(1)


async def settled(scheduler: ScriptedScheduler, request: RecordingReader) -> None:
    """Waits until the gateway has read all that the scheduler sent."""
    scheduler.session.tokens("k", [], len(request.sequences[0]))
    assert await request.next() == ("tokens", [])


async def taken_over(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler, num_durable: int
) -> RecordingReader:
    """A request with the tokens 5 and 6, `num_durable` of them in the store, at its second scheduler."""
    request = await client.running(scheduler)
    await grown(scheduler, request, 5, 6)
    scheduler.session.durable("k", num_durable)
    await settled(scheduler, request)
    await take_over(scheduler, successor)
    return request


def only_submit(scheduler: ScriptedScheduler) -> scheduler_v1.Submit:
    """The one request that a scheduler was sent."""
    (submit,) = scheduler.all("submit")
    assert isinstance(submit, scheduler_v1.Submit)
    return submit
