"""Runs of decoding sequences with and without a journal, and what they leave in Redis."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import redis
import uvloop

from benchmarks.journal.figures import OFF, SLOW, JournalMemory, JournalRun
from benchmarks.processes import running
from benchmarks.steps.figures import WARM_UP_STEPS
from benchmarks.steps.gateway import decode_to_the_end, decode_together
from benchmarks.steps.processes import ProcessEndpoints, running_scheduler, running_worker
from svc_common.supervisor.addresses import free_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from tests.chaos.proxy import Link, Trouble

NUM_SEQUENCES = 64
FORWARD_SECONDS = 0.010
OUTPUT_TOKENS = 200  # of requests whose memory is measured
SLOW_SECONDS = 0.5
_TIMEOUT = 120.0


def measure_gaps(mode: str, num_steps: int) -> JournalRun:
    """One run, in processes of its own. Raises BenchmarkFailed."""
    with _started() as (stack, endpoints, redis_url), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        url = urlsplit(redis_url)
        login, _, address = url.netloc.rpartition("@")
        link = Link(address)
        runner.run(link.start())
        through_link = url._replace(netloc=f"{login}@{link.address}").geturl()
        reached_at = through_link if mode == SLOW else redis_url
        stack.enter_context(running_scheduler(endpoints, reached_at, without_journal=mode == OFF))

        def start_worker() -> None:
            link.trouble = Trouble(delay=SLOW_SECONDS / 2)
            stack.enter_context(running_worker(endpoints, NUM_SEQUENCES, FORWARD_SECONDS))

        wanted = WARM_UP_STEPS + num_steps + 1
        times = runner.run(decode_together(endpoints.scheduler, NUM_SEQUENCES, wanted, start_worker, _TIMEOUT))
        # The scheduler ends, and writes its times; it still reaches Redis.
        runner.run(asyncio.to_thread(stack.close))
        runner.run(link.close())
        return JournalRun.of(times, json.loads(endpoints.scheduler_times.read_bytes())["durable"])


def measure_memory() -> JournalMemory:
    """What Redis holds of requests of OUTPUT_TOKENS tokens, once they have ended. Raises BenchmarkFailed."""
    with _started() as (stack, endpoints, redis_url):
        with ExitStack() as scheduler, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            scheduler.enter_context(running_scheduler(endpoints, redis_url))
            runner.run(
                decode_to_the_end(
                    endpoints.scheduler,
                    NUM_SEQUENCES,
                    OUTPUT_TOKENS,
                    lambda: stack.enter_context(running_worker(endpoints, NUM_SEQUENCES, 0.0)),
                    _TIMEOUT,
                )
            )
        # The scheduler has ended, and so it has written everything.
        with redis.Redis.from_url(redis_url) as store:
            keys = list(store.scan_iter("{quire}:request:*"))
            # By default only a sample of what a key holds is measured.
            num_bytes = sum(int(store.memory_usage(key, samples=0) or 0) for key in keys)
    return JournalMemory(num_bytes, NUM_SEQUENCES * OUTPUT_TOKENS)


@contextmanager
def _started() -> Iterator[tuple[ExitStack, ProcessEndpoints, str]]:
    """A Redis that runs, and what else is to end before it."""
    with TemporaryDirectory(prefix="quire-journal-") as folder, ExitStack() as stack:
        store = EmbeddedRedis.prepare(Path(folder), free_port())
        with running("Redis", store.command), stack:
            yield stack, ProcessEndpoints.choose(Path(folder)), store.url
