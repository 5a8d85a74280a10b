"""Measures, on the real model, how long streams stand still when a process dies (`make bench-recovery`).

    python -m benchmarks.recovery [--runs 20] [--cases worker,gateway] [--output FILE]

Eight streams run, a process is killed while they do, and what counts is the time until they go on: the first of them,
and the last. report.py defines both. Only all cases together replace the result.
"""

import asyncio
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.deployment import prepare_model
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.recovery.cases import CASES, FaultCase
from benchmarks.recovery.report import CaseFigures, Recovery, judge, recovery, recovery_table
from benchmarks.runner import failures_exit, log, make_parser, publish
from quire_client import AsyncClient
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.stack import Stack, stack

RESULT = RESULTS / "recovery.json"
NUM_STREAMS = 8
MAX_TOKENS = 200
_PROMPT_TOKENS = 64
_VOCABULARY = 40_000
_FIRST, _LAST = 20, 100  # of a stream's tokens, between which the fault comes
_SETTLE_SECONDS = 60.0
_QUIET_SECONDS = 1.0
_AT_ONCE = RestartPolicy(max_backoff=0.0)
"""Restarts at once. The supervisor's own policy backs off where a role dies again and again, as it does here."""


async def measure_case(case: FaultCase, num_runs: int, folder: Path) -> CaseFigures:
    """All runs of a case, over one deployment in bfloat16. Raises BenchmarkFailed."""
    rng = random.Random(case.name)
    recoveries: list[Recovery] = []
    async with AsyncExitStack() as entered:
        environment = {"QUIRE_DTYPE": "bfloat16"}
        running = await entered.enter_async_context(stack(folder, environment, case.counts, _AT_ONCE, case.adapt))
        clients = []
        for i in range(NUM_STREAMS):
            links = [await running.connect(f"client-{i}", each.dial_address) for each in running.addresses.grpc]
            clients.append(await entered.enter_async_context(AsyncClient(",".join(links))))
        for number in range(num_runs + 1):
            await _settle(running, case)
            found = await _run(running, case, clients, rng)
            if number:  # the first one warms up
                recoveries.append(found)
                log(f"  {number}: any {found.any:.2f} s, worst {found.worst:.2f} s")
    return CaseFigures(tuple(recoveries))


async def _run(running: Stack, case: FaultCase, clients: list[AsyncClient], rng: random.Random) -> Recovery:
    arrivals: list[list[float]] = [[] for _ in clients]

    async def read(i: int) -> None:
        prompt = [rng.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)]
        async for chunk in clients[i].stream(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True):
            arrivals[i] += [monotonic()] * len(chunk.token_ids)

    reading = [asyncio.create_task(read(i)) for i in range(len(clients))]
    try:
        wanted = rng.randint(_FIRST, _LAST)
        while min(map(len, arrivals)) < wanted:
            if any(task.done() for task in reading):
                raise BenchmarkFailed(f"{case.name}: a stream ended before the fault")
            await asyncio.sleep(0.001)
        victim = await _victim(running, case)
        fault = monotonic()
        running.send(victim, signal.SIGKILL)
        await asyncio.gather(*reading)
    finally:
        for task in reading:
            task.cancel()
    if any(len(times) != MAX_TOKENS for times in arrivals):
        raise BenchmarkFailed(f"{case.name}: streams of {sorted(map(len, arrivals))} tokens")
    try:
        return recovery(arrivals, fault)
    except ValueError as error:
        raise BenchmarkFailed(f"{case.name}: {error}") from error


async def _victim(running: Stack, case: FaultCase) -> str:
    """The one of its role that streams depend on, the most of them. Raises BenchmarkFailed where none do."""
    if case.role == "scheduler":
        leader = await running.leader()
        counts = {} if leader is None else {leader: NUM_STREAMS}
    elif case.role == "gateway":
        counts = Counter(name for i in range(NUM_STREAMS) if (name := running.last_gateway(f"client-{i}")))
    elif case.role == "worker":
        counts = await running.num_decoding_by_worker()
    else:
        counts = dict.fromkeys(running.instances(case.role), NUM_STREAMS)
    return busiest(case.name, counts)


def busiest(case: str, counts: Mapping[str, int]) -> str:
    """The role of most streams. Raises BenchmarkFailed where none has any."""
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if not count:
        raise BenchmarkFailed(f"{case}: no stream ran where the fault was to come")
    return name


async def _settle(running: Stack, case: FaultCase) -> None:
    """Returns when every role answers and every worker is in use, and has been for a while."""
    end = monotonic() + _SETTLE_SECONDS
    while monotonic() < end:
        leader = await running.leader()
        if running.is_ready() and leader is not None:
            ready = (await running.metrics(leader)).get("quire_workers_ready")
            if ready == case.counts.get("workers", 1):
                await asyncio.sleep(_QUIET_SECONDS)
                return
        await asyncio.sleep(0.1)
    raise BenchmarkFailed(f"{case.name}: not all roles came back in {_SETTLE_SECONDS:.0f} s")


def main() -> None:
    """Exits with 1 where there are no figures; missed targets do not change the status."""
    parser = make_parser(__doc__, RESULT, ", for all cases")
    parser.add_argument("--runs", type=int, default=20, help="faults of each kind; default 20")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="default all of them")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error("--runs is at least 1")
    chosen = [case for case in CASES if case.name in names]
    measured: dict[str, dict[str, Any]] = {}
    with failures_exit("recovery"), tempfile.TemporaryDirectory(prefix="quire-recovery-") as folder:
        model = prepare_model()
        for case in chosen:
            log(case.title)
            figures = asyncio.run(measure_case(case, options.runs, Path(folder, case.name)))
            measured[case.name] = {"title": case.title, **figures.to_json()}
    result = {
        **provenance("torch", "grpcio"),
        "model": model.name,
        "num_runs": options.runs,
        "num_streams": NUM_STREAMS,
        "max_tokens": MAX_TOKENS,
        "cases": measured,
        "targets": judge(measured, {case.name: case.bound for case in chosen}),
    }
    output = options.output or (RESULT if len(chosen) == len(CASES) else None)
    publish(result, output, {"From a fault to the next token": recovery_table(result)})


if __name__ == "__main__":
    main()
