"""Messages to a gateway that wait for one another are sent together."""

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.session_wire import message_of


def durable(number: int) -> scheduler_v1.Event:
    return scheduler_v1.Event(key=str(number), durable=scheduler_v1.Durable(num_tokens=number))


async def received(session: GatewaySession) -> list[tuple[int, bool, list[str]]]:
    """Epoch, whether there is a status, and the keys of the events of each message."""
    found = []
    while (message := await session.next()) is not None:
        found.append((message.epoch, message.HasField("status"), [event.key for event in message.events]))
    return found


async def test_events_that_wait_are_one_message_in_their_order() -> None:
    session = GatewaySession()
    for number in range(5):
        session.send(message_of(7, durable(2 * number), durable(2 * number + 1)))
    session.close()
    assert await received(session) == [(7, False, [str(number) for number in range(10)])]
    assert session.num_sent == 5


async def test_a_message_has_one_term_and_one_status_before_its_events() -> None:
    session = GatewaySession()
    status = scheduler_v1.SessionResponse(epoch=1, status=scheduler_v1.Status(is_store_degraded=True))
    session.send(message_of(1, durable(1)))
    session.send(status)
    session.send(message_of(1, durable(2)))
    session.send(message_of(2, durable(3)))
    session.send(message_of(2, durable(4)))
    session.close()
    assert await received(session) == [(1, False, ["1"]), (1, True, ["2"]), (2, False, ["3", "4"])]
