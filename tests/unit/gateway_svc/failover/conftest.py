"""Fixtures of the tests of takeovers."""

from collections.abc import AsyncIterator

import pytest

from gateway_sessions import MODEL, MODEL_INFO, SessionClient, dialling
from scripted_scheduler import ScriptedScheduler, serving


@pytest.fixture
async def successor() -> AsyncIterator[ScriptedScheduler]:
    """A standby scheduler, until `take_over`."""
    async with serving(ScriptedScheduler(MODEL, epoch=2)) as successor:
        successor.is_leader = False
        yield successor


@pytest.fixture
async def client(scheduler: ScriptedScheduler, successor: ScriptedScheduler) -> AsyncIterator[SessionClient]:
    """A gateway's session with the leader, which knows the standby."""
    async with dialling(scheduler.address, successor.address) as client:
        await client.wait_for(MODEL_INFO)
        yield client
