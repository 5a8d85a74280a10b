"""Events that more of a request is durable."""

import asyncio

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from request_logs import request_log
from scheduler_svc.durable_updates import DurableUpdates
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.live_request import LiveRequest


class Gateway(GatewaySession):
    """Keeps the messages that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[scheduler_v1.SessionResponse] = []

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        self.messages.append(message)


def durable(num_tokens: int) -> LiveRequest:
    """A request whose first sequence has tokens in the store."""
    log = request_log()
    log.sequences[0].token_ids = list(range(num_tokens))
    log.sequences[0].num_durable = num_tokens
    return LiveRequest(log)


async def test_events_of_one_call_are_one_message_for_each_gateway() -> None:
    epoch = 7
    updates = DurableUpdates(lambda: epoch)
    both, one = durable(100), durable(200)
    gateways = [Gateway(), Gateway()]
    for gateway in gateways:
        both.gateways.append(gateway)
    one.gateways.append(gateways[0])
    updates.add(both, 0)
    updates.add(one, 0)
    updates.add(both, 0)  # no more than before
    epoch = 8  # that of the time at which it is sent
    assert not gateways[0].messages
    await asyncio.sleep(0)
    for gateway, counts in zip(gateways, ([100, 200], [100]), strict=True):
        (message,) = gateway.messages
        assert message.epoch == 8
        assert [event.durable.num_tokens for event in message.events] == counts
    await asyncio.sleep(0)
    assert [len(gateway.messages) for gateway in gateways] == [1, 1]


async def test_a_request_without_gateways_has_no_events() -> None:
    updates = DurableUpdates(lambda: 1)
    live = durable(100)
    updates.add(live, 0)
    gateway = Gateway()
    live.gateways.append(gateway)
    await asyncio.sleep(0)
    assert not gateway.messages
    updates.add(live, 0)  # it was not sent before
    await asyncio.sleep(0)
    assert len(gateway.messages) == 1
