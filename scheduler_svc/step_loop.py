"""The steps of one worker over an open stream: plan, send, commit."""

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress

import grpc

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.step import StepPlan
from scheduler_svc.core.step_pacing import StepPacing
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.step_responses import ResponseValidator
from scheduler_svc.step_wire import plan_to_proto
from scheduler_svc.worker_client import StepCall

log = logging.getLogger("quire.scheduler")

_STEP_TIMEOUT = 120.0  # seconds that any step may take
# Times the seconds that are expected of a step, which it may take. A worker reports the rate of short prompts, and
# attention makes one that is computed in one step several times as slow for each token.
_STEP_FACTOR = 20.0


class LinkBroken(Exception):  # noqa: N818
    """The stream to a worker cannot continue. The text is for the operator."""


class PlanningFailed(Exception):  # noqa: N818
    """The core raised while it planned a step. The worker has not crashed."""


class StepLoop:
    """Plans, sends and commits the steps of `replica`; the next step is sent while the worker runs the last one."""

    def __init__(
        self,
        engine: SchedulerEngine,
        replica: Replica,
        call: StepCall,
        opening: worker_v1.StepRequest,
        vocab_size: int,
    ) -> None:
        """`call` is open, by `opening`."""
        self.replica = replica
        self.wake = asyncio.Event()
        """Set whenever there may be something to plan or to commit."""
        self.has_committed = False
        """Whether a step was answered and committed."""
        self._engine = engine
        self._call = call
        self._opening = opening
        self._pacing = StepPacing(replica)
        self._validator = ResponseValidator(opening, vocab_size, replica.shape.max_sampled_tokens)
        self._responses: deque[worker_v1.StepResponse] = deque()
        self._progressed_at = 0.0  # when a step was answered last, or the first of those in flight was planned

    async def run(self) -> None:
        """Runs until the replica has left. Raises LinkBroken, AioRpcError, InvalidResponse and PlanningFailed."""
        reader = asyncio.create_task(self._read())
        try:
            while not self._engine.has_left(self.replica):
                seconds = await self._send_due()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds or None):
                        await self.wake.wait()
                self.wake.clear()
                while self._responses:
                    self._commit(self._responses.popleft())
                if reader.done():
                    raise LinkBroken(f"step stream ended: {await self._call.details()}")
        except asyncio.InvalidStateError:  # grpc raises it for a write to a call that has ended
            raise LinkBroken(f"step stream ended: {await self._call.details()}") from None
        finally:
            reader.cancel()

    def check_progress(self) -> None:
        """Raises LinkBroken when the first of the steps in flight takes too long."""
        if not self.replica.steps_in_flight:
            return
        expected = self.replica.costs.plan_seconds(self.replica.steps_in_flight[0])
        timeout = max(_STEP_TIMEOUT, _STEP_FACTOR * expected)
        if time.monotonic() > self._progressed_at + timeout:
            raise LinkBroken(f"no answer to a step in {timeout:.0f} s")

    async def _send_due(self) -> float:
        """Plans and sends the steps that are due. Returns the seconds until the next one is; 0: once `wake` is set."""
        while not (seconds := self._pacing.seconds_until_next(time.monotonic())):
            plan = self._plan()
            self._pacing.note_planned(None if plan is None else plan.step_id)
            if plan is None:
                break
            if len(self.replica.steps_in_flight) == 1:
                self._progressed_at = time.monotonic()
            await self._call.write(plan_to_proto(plan, self._opening.epoch, self._opening.generation))
            self._validator.expect(plan)
        return seconds

    def _plan(self) -> StepPlan | None:
        try:
            return self._engine.schedule(self.replica)
        except Exception as error:
            raise PlanningFailed from error

    async def _read(self) -> None:
        try:
            while isinstance(response := await self._call.read(), worker_v1.StepResponse):
                self._responses.append(response)
                self.wake.set()
        except grpc.aio.AioRpcError:
            pass  # `run` reads the call's status
        finally:
            self.wake.set()

    def _commit(self, response: worker_v1.StepResponse) -> None:
        outcome = self._validator.outcome_of(response, self.replica)
        result = response.result
        for failure in result.failures:
            log.error("sequence failed", extra={"worker": self.replica.name, "why": failure.message})
        for swap in result.swaps:
            if swap.HasField("failure"):
                log.error("swap failed", extra={"worker": self.replica.name, "why": swap.failure})
        self._engine.commit(self.replica, outcome)
        self.has_committed = True
        self._pacing.note_end(response.step_id, result.busy_us / 1e6, result.idle_us / 1e6)
        self._progressed_at = time.monotonic()
