"""Real links from a real engine to scripted workers, over real gRPC, and a gateway that keeps its requests' tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from checksum_service import VOCAB, ChecksumService, serve
from memory_worker import continuation
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import EngineSettings, SchedulerEngine
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.leadership import Fenced
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.worker_pool import WorkerPool
from svc_common.addresses import HostPort

PROMPT = list(range(10))
Change = Callable[[worker_v1.StepResponse], None]


class ScriptedWorker(ChecksumService):
    """Returns log-probabilities of every token. On request it changes a response, or stops responding."""

    def __init__(self, **about: Any) -> None:
        super().__init__()
        self.about.MergeFrom(worker_v1.DescribeResponse(**about))
        self.change: Change | None = None  # of the fifth response with a token
        self.repeats = False
        self.num_drawn = 0
        self.is_running = asyncio.Event()
        self.is_running.set()
        self.num_open = 0
        self.num_looks = 0  # calls of Describe

    async def looked_at(self) -> None:
        """Waits until the watchdog has checked this worker once more."""
        enough = self.num_looks + 2  # the first check may have begun before
        await until(lambda: self.num_looks >= enough)

    async def Describe(self, request: worker_v1.DescribeRequest, context: Any) -> worker_v1.DescribeResponse:
        self.num_looks += 1
        await self.is_running.wait()
        return await super().Describe(request, context)

    async def Step(
        self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
    ) -> AsyncIterator[worker_v1.StepResponse]:
        self.num_open += 1
        try:
            async for response in super().Step(requests, context):
                await self.is_running.wait()
                _add_logprobs(response.result)
                self.num_drawn += bool(response.result.token_ids)
                is_due = self.num_drawn == 5 and len(self.openings) == 1
                if is_due and self.change is not None:
                    self.change(response)
                yield response
                if is_due and self.repeats:
                    yield response
        finally:
            self.num_open -= 1


def _add_logprobs(result: worker_v1.StepResult) -> None:
    drawn = iter(result.token_ids)
    for schedule_index, count in enumerate(result.num_tokens):
        for _ in range(count):
            token = next(drawn)
            tokens = [worker_v1.TokenLogprobs(logprob=-1, top=[worker_v1.Logprob(token_id=token, logprob=-1)])]
            result.logprobs.add(schedule_index=schedule_index, tokens=tokens)


class Gateway(GatewaySession):
    """A session that keeps the tokens of its requests."""

    def __init__(self, engine: SchedulerEngine) -> None:
        super().__init__()
        self._engine = engine
        self._num_submitted = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.failed: set[str] = set()

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        for event in message.events:
            if event.HasField("failed"):
                self.failed.add(event.key)
            if event.HasField("tokens"):
                tokens = self.tokens.setdefault(event.key, [])
                assert event.tokens.offset == len(tokens)
                tokens += event.tokens.token_ids
                if event.tokens.HasField("end"):
                    self.ended.add(event.key)

    def submit(self, max_tokens: int = 24, prompt: list[int] = PROMPT) -> str:
        """Submit a request with log-probabilities; returns its key."""
        self._num_submitted += 1
        key = f"{id(self)}-{time.monotonic_ns()}-{self._num_submitted}"
        sampling = worker_v1.SamplingParams(seed=1, logprobs=1)
        submit = scheduler_v1.Submit(key=key, submission_id=key, tenant="default", prompt_token_ids=prompt, n=1,
                                     max_tokens=max_tokens, sampling=sampling, command_id=1)  # fmt: skip
        self._engine.take(scheduler_v1.SessionRequest(submit=submit), self)
        return key

    async def finish(self, key: str, max_tokens: int = 24) -> None:
        """Waits for the end of a request, and compares its tokens with the expected ones."""
        await until(lambda: key in self.ended | self.failed)
        assert self.tokens[key] == continuation(PROMPT, max_tokens, VOCAB)


class Deployment:
    """An engine with a gateway and links to workers."""

    def __init__(self, store: RedisStore) -> None:
        self.num_fenced = 0
        self.failures: list[Exception] = []
        self.leads = True
        self.engine = SchedulerEngine(
            partial(Scheduler, SchedulerLimits(64, 16)),
            store,
            time.time_ns() // 1000,
            EngineSettings(),
            self._raise_epoch,
            self._fence,
            self.failures.append,
        )
        self.gateway = Gateway(self.engine)
        self.engine.join(self.gateway)

    async def workers(self, count: int) -> None:
        """Waits until this many workers are in use."""
        await until(lambda: len(self.engine.replicas) == count)

    async def _raise_epoch(self, above: int) -> int:
        if not self.leads:
            raise Fenced("another leads")
        return above + 1

    def _fence(self) -> None:
        self.num_fenced += 1


@asynccontextmanager
async def deployment(*addresses: str) -> AsyncIterator[Deployment]:
    store = RedisStore("redis://127.0.0.1:1/0")  # there is no store here
    running = Deployment(store)
    engine = running.engine
    pool = WorkerPool(engine, [HostPort.parse(address) for address in addresses])
    tasks = [asyncio.create_task(work) for work in (engine.journal.run(), pool.run())]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


@asynccontextmanager
async def served(*services: ScriptedWorker) -> AsyncIterator[list[str]]:
    """The addresses of these workers."""
    running = [await serve(service) for service in services]
    try:
        yield [f"127.0.0.1:{port}" for _, port in running]
    finally:
        for server, _ in running:
            await server.stop(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


def of_response(**fields: int) -> Change:
    """Adds values to fields of a response."""

    def change(response: worker_v1.StepResponse) -> None:
        for name, more in fields.items():
            setattr(response, name, getattr(response, name) + more)

    return change
