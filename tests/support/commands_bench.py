"""Commands of gateways over a core without replicas, and a Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.commands import Commands
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.live_state import Graces
from scheduler_svc.model_versions import ModelVersions
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.spending import Spending
from scheduler_svc.store.base import Gap, KeyTaken, WriteBatch
from scheduler_svc.store.redis import RedisStore

UNRECORDED = scheduler_v1.Retention(is_unrecorded=True)


class HeldUpStore(RedisStore):
    """A store whose writes by the journal wait until `goes_on` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        await self.goes_on.wait()
        return await super().write(batch, epoch)


class Gateway(GatewaySession):
    """Keeps the answers to its commands, by command id."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, scheduler_v1.Event] = {}

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        self.answers |= {event.command_id: event for event in message.events if event.command_id}


@dataclass(eq=False)
class Bench:
    """Commands over a core without replicas, and a gateway that sends them."""

    store: HeldUpStore
    core: Scheduler
    journal: Journal
    requests: LiveRequests
    commands: Commands
    gateway: Gateway

    @property
    def answers(self) -> dict[int, scheduler_v1.Event]:
        return self.gateway.answers

    def ask(
        self,
        **command: scheduler_v1.Submit
        | scheduler_v1.Attach
        | scheduler_v1.Cancel
        | scheduler_v1.Lookup
        | scheduler_v1.Delete,
    ) -> None:
        self.commands.take(scheduler_v1.SessionRequest(**command), self.gateway)  # type: ignore[arg-type]

    async def submit(self, submission_id: str, key: str = "k") -> scheduler_v1.Event:
        command_id = len(self.answers) + 1
        self.ask(
            submit=scheduler_v1.Submit(
                key=key,
                submission_id=submission_id,
                tenant="t",
                weight=1,
                prompt_token_ids=[1, 2],
                n=1,
                max_tokens=8,
                detachable=True,
                body_digest=b"body",
                command_id=command_id,
            )
        )
        await until(lambda: command_id in self.answers)
        return self.answers[command_id]

    async def attach(self, key: str = "k") -> scheduler_v1.Event:
        command_id = len(self.answers) + 1
        self.ask(attach=scheduler_v1.Attach(key=key, command_id=command_id))
        await until(lambda: command_id in self.answers)
        return self.answers[command_id]

    def cancel(self) -> None:
        self.ask(cancel=scheduler_v1.Cancel(key="k"))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(url: str, limits: SchedulerLimits | None = None, *, needs_store: bool = False) -> AsyncIterator[Bench]:
    store = HeldUpStore(url)
    epoch = await store.take_lease("bench", 60)
    assert epoch is not None
    core = Scheduler(limits or SchedulerLimits())
    journal = Journal(store, epoch, lambda: None, lambda log, index: None, Spending(Budgets()))
    requests = LiveRequests(ModelVersions(lambda: core, 60), journal, Graces())
    gateway = Gateway()
    commands = Commands(requests, store, journal, [gateway], RequestRates(store, "1"), needs_store=needs_store)
    running = asyncio.create_task(journal.run())
    try:
        yield Bench(store, core, journal, requests, commands, gateway)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


def lose_everything(url: str) -> None:
    """Like a restart without the data."""
    with redis.Redis.from_url(url) as keys:
        keys.flushall()
        keys.script_flush()


def unrecorded(**fields: object) -> scheduler_v1.Submit:
    """A submission without a record."""
    known: dict[str, object] = {"key": "v", "submission_id": "v", "tenant": "t", "n": 1, "max_tokens": 8}
    known |= {"prompt_token_ids": [1, 2], "retention": UNRECORDED, "command_id": 7}
    return scheduler_v1.Submit(**(known | fields))  # type: ignore[arg-type]


def named(**fields: object) -> scheduler_v1.Submit:
    """A submission with a record."""
    return unrecorded(key="k", submission_id="k", retention=None, detachable=True, **fields)


def again(**fields: object) -> scheduler_v1.Submit:
    """The submission of `named` or `unrecorded`, by a gateway that was away meanwhile."""
    return unrecorded(detachable=True, was_accepted=True, **{"command_id": 8, **fields})
