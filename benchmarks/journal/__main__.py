"""Measures what the journal costs streams, how far it is behind, and what Redis holds (`make bench-journal`).

    python -m benchmarks.journal [--runs 5] [--steps 1000] [--output FILE]

64 sequences decode on a worker whose forward pass sleeps for 10 ms, with the journal, without it, and with it while
Redis takes half a second for each answer; the three take turns. Targets are in report.py.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import redis
import uvloop

from benchmarks.journal.report import MODES, OFF, SLOW, JournalMemory, JournalRun, journal_table, judge, summarize
from benchmarks.processes import running
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, publish
from benchmarks.steps.gateway import decode_to_the_end, decode_together
from benchmarks.steps.processes import ProcessEndpoints, running_scheduler, running_worker
from benchmarks.steps.report import WARM_UP_STEPS
from svc_common.supervisor.addresses import free_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from tests.chaos.proxy import Link, LinkFault

RESULT = RESULTS / "journal.json"
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
            link.fault = LinkFault(delay=SLOW_SECONDS / 2)
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


def measure(num_runs: int, num_steps: int) -> dict[str, Any]:
    """All of it, as a result holds it. Raises BenchmarkFailed."""
    runs: dict[str, list[JournalRun]] = {mode: [] for mode in MODES}
    for number, mode in in_turns(MODES, num_runs):
        log(f"run {number + 1}, {mode}")
        runs[mode].append(measure_gaps(mode, num_steps))
    log("memory")
    result = {
        **provenance("grpcio", "redis", "uvloop"),
        "num_runs": num_runs,
        "num_steps": num_steps,
        "num_sequences": NUM_SEQUENCES,
        "forward_ms": FORWARD_SECONDS * 1e3,
        "output_tokens": OUTPUT_TOKENS,
        **summarize(runs, measure_memory()),
    }
    return {**result, "targets": judge(result)}


@contextmanager
def _started() -> Iterator[tuple[ExitStack, ProcessEndpoints, str]]:
    """A running Redis, the stack of what ends before it, and the endpoints."""
    with TemporaryDirectory(prefix="quire-journal-") as folder, ExitStack() as stack:
        store = EmbeddedRedis.prepare(Path(folder), free_port())
        with running("Redis", store.command), stack:
            yield stack, ProcessEndpoints.choose(Path(folder)), store.url


def main() -> None:
    """Exits with 1 where there are no figures; missed targets do not change the status."""
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--runs", type=int, default=5, help="runs of each mode; default 5")
    parser.add_argument("--steps", type=int, default=1000, help="measured steps of each run; default 1000")
    options = parser.parse_args()
    if options.runs < 1 or options.steps < 1:
        parser.error("--runs and --steps are at least 1")
    with failures_exit("journal"):
        result = measure(options.runs, options.steps)
    publish(result, options.output or RESULT, {"Streams and the journal": journal_table(result)})


if __name__ == "__main__":
    main()
