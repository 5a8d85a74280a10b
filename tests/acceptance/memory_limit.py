"""Load on a deployment whose memory is limited to 10 % more than the model and its KV blocks need.

    python -m tests.acceptance.memory_limit [--seconds 600] [--streams 48] [--unlimited-seconds 60]

The real model. The streams want more blocks than there are. The limit is that of a cgroup that is made for the
deployment, where this process may make one: beyond it, the kernel kills. It is set once the deployment has answered
its first requests, with host blocks for swaps, of 1 GiB, that do not fit below it. Otherwise it is QUIRE_MEMORY_LIMIT
of the worker, of which nobody kills anything; then the worker's memory is compared with it.

The same load also runs without the limit, for a shorter time: in the same deployment once the limit is removed, or
without a cgroup in one of its own, before. Tokens per second and waits for the first token say how much slower the
limit makes the load.

The last line is JSON; `in_cgroup` says whether the kernel enforced the limit. Exits with 1 if it did not, if a process
was killed or restarted, if a stream lacks tokens or has others than without a limit, if memory was never short, if it
went beyond the limit, or if the load has less than a tenth of its tokens per second without the limit.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import httpx
import uvloop

from benchmarks.deployment import SUPERVISOR, Deployment, prepare_model, running_quire, scrape
from quire_client import AsyncClient
from tests.acceptance.memory_cgroup import Cgroup, own_cgroup
from tests.acceptance.memory_load import Load, Pace

_HEADROOM = 1.1
_FAR_AWAY = 2**40  # bytes: a limit that says only whose memory is read
_SWAP_GIB = 1.0
_NUM_BLOCKS = 1024
_SAMPLE_SECONDS = 0.5
_LEAST_SPEED = 0.1  # of that without a limit: below it, the deployment hardly serves


@dataclass
class Outcome:
    """What happened under the limit."""

    in_cgroup: bool = False  # whether the kernel kills beyond the limit
    limited_by: str = ""
    limit: int = 0
    kernel_limit: int | None = None  # of the cgroup, as the kernel reports it
    processes: int = 0  # that ran in the cgroup
    limited: Pace | None = None
    unlimited: Pace | None = None
    speed: float = 0.0  # tokens per second, of those without the limit
    most_used_share: float = 0.0
    seconds_short: float = 0.0
    seconds_critical: float = 0.0
    preemptions: float = 0.0
    failed: int = 0  # sequences, because memory ran out in a step
    killed: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerMemory:
    """What the worker says of its memory."""

    used: int
    limit: int
    limited_by: str
    pressure: str
    kv: int
    swap: int

    @classmethod
    def now(cls, quire: Deployment) -> "WorkerMemory":
        answer = httpx.get(f"http://{quire.worker_metrics}/health", trust_env=False, timeout=30).raise_for_status()
        memory = answer.json()["memory"]
        host = memory["host"]
        parts = memory.get("kv_bytes", 0), memory.get("swap_bytes", 0)
        return cls(host["used_bytes"], host["limit_bytes"], host["limited_by"], memory["pressure"], *parts)


def limit_for(quire: Deployment) -> int:
    """Bytes: a little more than the deployment, or its worker, uses with all of its KV blocks in memory and none for
    swaps. Before the first requests it is more, as a start itself takes memory.
    """
    about, memory = quire.describe(), WorkerMemory.now(quire)
    return int(_HEADROOM * (memory.used - memory.kv - memory.swap + about.num_blocks * about.block_bytes))


async def _sample(quire: Deployment, outcome: Outcome) -> None:
    """Notes how short memory is, until it is cancelled."""
    while True:
        memory = await asyncio.to_thread(WorkerMemory.now, quire)
        outcome.most_used_share = max(outcome.most_used_share, memory.used / memory.limit)
        outcome.seconds_short += _SAMPLE_SECONDS * (memory.pressure != "none")
        outcome.seconds_critical += _SAMPLE_SECONDS * (memory.pressure == "critical")
        await asyncio.sleep(_SAMPLE_SECONDS)


async def load(
    quire: Deployment, cgroup: Cgroup | None, streams: int, seconds: float, unlimited_seconds: float
) -> Outcome:
    """Sends the load below the limit. Sets the limit of the cgroup, if there is one, and then removes it for the same
    load without a limit.
    """
    outcome = Outcome()
    before = scrape(quire.worker_metrics)
    async with AsyncClient(quire.gateway) as client:
        vocab_size = (await client.models())[0].vocab_size
        traffic = Load(client, vocab_size, outcome.errors)
        await traffic.learn()
        if cgroup is not None:
            cgroup.set_limit(limit_for(quire))
            await asyncio.sleep(1.0)  # until the worker has read it
            outcome.kernel_limit, outcome.processes = cgroup.limit, cgroup.num_processes
        memory = WorkerMemory.now(quire)
        outcome.limited_by, outcome.limit = memory.limited_by, memory.limit
        outcome.in_cgroup = outcome.processes > 0 and outcome.limit == outcome.kernel_limit
        print(f"limit {outcome.limit / 2**20:,.0f} MiB of {outcome.limited_by}", flush=True)
        sampling = asyncio.create_task(_sample(quire, outcome))
        outcome.limited = await traffic.run(streams, seconds, lambda: outcome.seconds_short > 0)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        _check(outcome, before, quire, cgroup)
        if cgroup is not None:
            cgroup.set_limit(_FAR_AWAY)
            await asyncio.sleep(1.0)
            outcome.unlimited = await Load(client, vocab_size, outcome.errors, seed=2).run(streams, unlimited_seconds)
    return outcome


async def load_without_limit(quire: Deployment, streams: int, seconds: float) -> tuple[Pace, list[str]]:
    """The same load, and what went wrong, in a deployment whose memory suffices."""
    errors: list[str] = []
    async with AsyncClient(quire.gateway) as client:
        load = Load(client, (await client.models())[0].vocab_size, errors, seed=2)
        return await load.run(streams, seconds), errors


def _check(outcome: Outcome, before: Mapping[tuple[str, str], float], quire: Deployment, cgroup: Cgroup | None) -> None:
    """Notes what else happened under the limit, and what of it is wrong."""
    after = scrape(quire.worker_metrics)
    if after["process_start_time_seconds", ""] != before["process_start_time_seconds", ""]:
        outcome.errors.append("the worker was started again")
    outcome.failed = round(after["quire_worker_out_of_memory_total", ""])
    page = scrape(quire.scheduler_metrics, "method")
    methods = ("swap", "keep", "recompute")
    outcome.preemptions = sum(page.get(("quire_preemptions_total", method), 0.0) for method in methods)
    outcome.killed = cgroup.num_killed if cgroup is not None else 0
    if outcome.killed:
        outcome.errors.append(f"the kernel killed {outcome.killed} processes")
    if cgroup is not None and not outcome.in_cgroup:
        outcome.errors.append(f"the worker does not read the limit of {cgroup.folder}")
    if not outcome.seconds_short:
        outcome.errors.append("memory was never short: nothing is shown")
    if outcome.most_used_share > 1:
        outcome.errors.append("memory went beyond the limit")


def measure(
    streams: int,
    seconds: float,
    unlimited_seconds: float,
    num_blocks: int = _NUM_BLOCKS,
    thresholds: Mapping[str, str] | None = None,
    least_speed: float = _LEAST_SPEED,
) -> Outcome:
    """Runs the deployment below its limit, and the load on it. `thresholds` are other settings than the defaults."""
    # Otherwise tokens may depend on how a prompt is split, as on what is cached.
    settings = {"QUIRE_NUM_BLOCKS": str(num_blocks), "QUIRE_DETERMINISTIC": "true", **(thresholds or {})}
    settings["QUIRE_PREEMPTION"] = "swap"  # wherever the host has room, which is beyond the limit
    prepare_model()
    unlimited: Pace | None = None
    errors: list[str] = []
    with own_cgroup() as cgroup:
        if cgroup is not None:
            cgroup.set_limit(_FAR_AWAY)
            settings["QUIRE_SWAP_SPACE"] = f"{_SWAP_GIB:g}"  # a worker that knew the limit would refuse it
            command = (*cgroup.launcher, *SUPERVISOR)
        else:
            print("no cgroup may be made here: the limit is QUIRE_MEMORY_LIMIT of the worker", flush=True)
            command = SUPERVISOR
            with running_quire("quire", {**settings, "QUIRE_MEMORY_LIMIT": f"{_FAR_AWAY / 2**30:g}"}) as quire:
                settings["QUIRE_MEMORY_LIMIT"] = f"{limit_for(quire) / 2**30:.3f}"
                unlimited, errors = uvloop.run(load_without_limit(quire, streams, unlimited_seconds))
        with running_quire("quire", settings, supervisor=command) as quire:
            outcome = uvloop.run(load(quire, cgroup, streams, seconds, unlimited_seconds))
    outcome.errors += errors
    outcome.unlimited = outcome.unlimited or unlimited
    compare(outcome, least_speed)
    return outcome


def compare(outcome: Outcome, least_speed: float = _LEAST_SPEED) -> None:
    """Notes how fast the load was beside the same load without the limit."""
    limited, unlimited = outcome.limited, outcome.unlimited
    if limited is None or unlimited is None or not unlimited.tokens_per_second:
        outcome.errors.append("without a limit no tokens came")
        return
    outcome.speed = round(limited.tokens_per_second / unlimited.tokens_per_second, 3)
    if outcome.speed < least_speed:
        outcome.errors.append(f"below the limit the load has {outcome.speed:.1%} of its speed")


def _describe(title: str, pace: Pace | None) -> str:
    if pace is None:
        return f"{title}: not measured"
    return (
        f"{title}: {pace.tokens_per_second:,.1f} tokens/s over {pace.seconds:.0f} s; first token after "
        f"{pace.median_wait:.2f} s (median), {pace.longest_wait:.2f} s (most)"
    )


def main() -> None:
    """Parses the flags, measures, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, default %(default)s")
    parser.add_argument("--streams", type=int, default=48, help="at a time, default %(default)s")
    parser.add_argument(
        "--unlimited-seconds", type=float, default=60.0, help="of load without the limit, default %(default)s"
    )
    options = parser.parse_args()
    outcome = measure(options.streams, options.seconds, options.unlimited_seconds)
    if not outcome.in_cgroup:
        outcome.errors.append("not within a cgroup with the limit: it is not shown that nothing is killed")
    print(_describe("below the limit", outcome.limited))
    print(_describe("without it", outcome.unlimited))
    for error in outcome.errors:
        print(f"error: {error}", flush=True)
    print(json.dumps({**asdict(outcome), "errors": len(outcome.errors)}))
    sys.exit(1 if outcome.errors else 0)


if __name__ == "__main__":
    main()
