"""The scheduler as its own program runs it, with the time of each step's parts written down.

    python -m benchmarks.steps.scheduler --port PORT --worker HOST:PORT --redis URL --times FILE

At SIGTERM it writes the times, in seconds; clock times are of the machine's monotonic clock.
"""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import uvloop

from benchmarks.steps.figures import SchedulerTimes
from quire.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.plan import Event, StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.records import Records, RecordWriter
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.worker_link import WorkerPool
from svc_common.garbage import settle_garbage
from svc_common.server import INNER_MESSAGE_BYTES, bind, create_server, run_until_signal


class TimedScheduler(Scheduler):
    """The core, which tells how long its last call took."""

    seconds = 0.0

    def schedule(self, replica: Replica, now: float) -> StepPlan | None:
        began = perf_counter()
        try:
            return super().schedule(replica, now)
        finally:
            self.seconds = perf_counter() - began

    def commit(self, replica: Replica, outcome: StepOutcome, now: float) -> list[Event]:
        began = perf_counter()
        try:
            return super().commit(replica, outcome, now)
        finally:
            self.seconds = perf_counter() - began


class TimedEngine(Engine):
    """The engine, which writes down when each step was planned and answered, and how long both took."""

    def __init__(self, core: TimedScheduler, writer: RecordWriter) -> None:
        super().__init__(core, writer, detach_grace=0)
        self._core = core
        self.times: dict[int, SchedulerTimes] = {}

    def schedule(self, replica: Replica) -> StepPlan | None:
        plan = super().schedule(replica)
        if plan is not None:
            self.times[plan.step_id] = SchedulerTimes(
                plan.step_id, len(plan.scheduled), plan.num_tokens, self._core.seconds, perf_counter()
            )
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        times = self.times[replica.in_flight[0].step_id]
        times.answered = perf_counter()
        super().commit(replica, outcome)
        times.commit = self._core.seconds
        times.tell = perf_counter() - times.answered - times.commit


async def serve(port: int, worker: str, redis_url: str) -> list[SchedulerTimes]:
    """What scheduler_svc's own program starts, less health, metrics page and deadlines. Until a signal; the times."""
    records = Records(redis_url, ttl=3600)
    writer = RecordWriter(records)
    engine = TimedEngine(TimedScheduler(Limits()), writer)
    server = create_server(max_message_bytes=INNER_MESSAGE_BYTES)
    add_SchedulerServiceServicer_to_server(SchedulerServicer(engine, records), server)
    bind(server, "127.0.0.1", port)
    await server.start()
    tasks = [asyncio.create_task(writer.run()), asyncio.create_task(WorkerPool(engine, [worker]).run())]
    settle_garbage()
    await run_until_signal(lambda: server.stop(0))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await records.close()
    return list(engine.times.values())


def main() -> None:
    """Reads flags, serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker", required=True, help="the worker's address")
    parser.add_argument("--redis", required=True, help="where requests are recorded")
    parser.add_argument("--times", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        steps = runner.run(serve(options.port, options.worker, options.redis))
    options.times.write_text(json.dumps([asdict(step) for step in steps]))


if __name__ == "__main__":
    main()
