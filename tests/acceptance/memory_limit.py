"""Load on a deployment whose memory is limited to 10 % more than the model and its KV blocks need.

    python -m tests.acceptance.memory_limit [--seconds 600] [--streams 48]

The real model. The streams want more blocks than there are. The limit is that of a cgroup that is made for the
deployment, where this process may make one: beyond it, the kernel kills. It is set once the deployment has answered
its first requests, with host blocks for swaps, of 1 GiB, that do not fit below it. Otherwise it is QUIRE_MEMORY_LIMIT
of the worker, of which nobody kills anything; then the worker's memory is compared with it.

The last line is JSON. Exits with 1 if a process was killed or restarted, if a stream lacks tokens or has others than
without a limit, if memory was never short, or if it went beyond the limit.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import uvloop

from benchmarks.deployment import SUPERVISOR, Deployment, prepare_model, running_quire, scrape
from quire_client import AsyncClient
from worker_svc.host_memory import CGROUPS, PROC

_HEADROOM = 1.1
_FAR_AWAY = 2**40  # bytes: a limit that says only whose memory is read
_SWAP_GIB = 1.0
_NUM_BLOCKS = 1024
_PROMPT, _OUTPUT = (16, 400), (100, 700)
_NUM_REPEATED = 4  # prompts that are sent again and again, whose tokens are known from before the limit
_SAMPLE_SECONDS = 0.5
_LONGER_SECONDS = 120.0  # that a slow machine may take until memory is short


@dataclass(frozen=True)
class Cgroup:
    """A cgroup of this process's own one."""

    folder: Path
    is_v2: bool

    def set_limit(self, num_bytes: int) -> None:
        (self.folder / ("memory.max" if self.is_v2 else "memory.limit_in_bytes")).write_text(str(num_bytes))

    @property
    def num_killed(self) -> int:
        """How many processes the kernel has killed here for memory."""
        text = (self.folder / ("memory.events" if self.is_v2 else "memory.oom_control")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    @property
    def launcher(self) -> tuple[str, ...]:
        """A command that runs its arguments here."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))


@contextmanager
def own_cgroup() -> Iterator[Cgroup | None]:
    """A new cgroup without a limit, which is removed at the end. None: this process may not make one."""
    made = _make_cgroup()
    try:
        yield made
    finally:
        for _ in range(50 if made is not None else 0):
            with suppress(OSError):
                made.folder.rmdir()  # type: ignore[union-attr]
                break
            time.sleep(0.1)  # its processes are ending


def _make_cgroup() -> Cgroup | None:
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        folder = (CGROUPS if is_v2 else CGROUPS / "memory") / path.lstrip("/") / f"quire-memory-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            if (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).exists():
                return Cgroup(folder, is_v2)
            folder.rmdir()
    return None


@dataclass
class Outcome:
    """What happened under the limit."""

    limited_by: str = ""
    limit: int = 0
    streams_ended: int = 0
    tokens: int = 0
    seconds: float = 0.0
    most_used_share: float = 0.0
    seconds_short: float = 0.0
    seconds_critical: float = 0.0
    preemptions: float = 0.0
    failed: int = 0  # sequences, because memory ran out in a step
    killed: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """A request, and how many tokens it gets."""

    prompt: list[int]
    max_tokens: int

    async def send(self, client: AsyncClient) -> list[int]:
        return [
            token
            async for chunk in client.stream(self.prompt, max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0)
            for token in chunk.token_ids
        ]


class Load:
    """Streams of random prompts, some of which repeat earlier ones."""

    def __init__(self, client: AsyncClient, vocab_size: int, outcome: Outcome) -> None:
        self._client, self._outcome = client, outcome
        self._rng = random.Random(1)
        self._vocab_size = vocab_size
        self._repeated = [self._new_call() for _ in range(_NUM_REPEATED)]
        self._known: list[list[int]] = []

    async def learn(self) -> None:
        """Sends the prompts that are repeated, while nothing is short."""
        self._known = [await call.send(self._client) for call in self._repeated]

    async def run(self, num_streams: int, seconds: float) -> None:
        """So many streams at a time, until memory was short, or for a while longer. Those that run at the end are
        awaited.
        """
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._stream(end, min(10 * seconds, _LONGER_SECONDS)) for _ in range(num_streams)))

    async def _stream(self, end: float, longer: float) -> None:
        while time.monotonic() < end + (0.0 if self._outcome.seconds_short else longer):
            place = self._rng.randrange(8 * _NUM_REPEATED)
            call = self._repeated[place] if place < _NUM_REPEATED else self._new_call()
            try:
                tokens = await call.send(self._client)
            except Exception as error:
                self._outcome.errors.append(f"a stream failed: {type(error).__name__}: {error}")
                return
            if len(tokens) != call.max_tokens:
                self._outcome.errors.append(f"a stream has {len(tokens)} of {call.max_tokens} tokens")
            if place < _NUM_REPEATED and tokens != self._known[place]:
                self._outcome.errors.append(f"repeated prompt {place} has other tokens than before")
            self._outcome.streams_ended += 1
            self._outcome.tokens += len(tokens)

    def _new_call(self) -> Call:
        length = self._rng.randint(*_PROMPT)
        return Call([self._rng.randrange(self._vocab_size) for _ in range(length)], self._rng.randint(*_OUTPUT))


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


async def load(quire: Deployment, cgroup: Cgroup | None, streams: int, seconds: float) -> Outcome:
    """Sets the limit of the cgroup, if there is one, and sends the load."""
    outcome = Outcome()
    before = scrape(quire.worker_metrics)
    async with AsyncClient(quire.gateway) as client:
        traffic = Load(client, (await client.models())[0].vocab_size, outcome)
        await traffic.learn()
        if cgroup is not None:
            cgroup.set_limit(limit_for(quire))
            await asyncio.sleep(1.0)  # until the worker has read it
        memory = WorkerMemory.now(quire)
        outcome.limited_by, outcome.limit = memory.limited_by, memory.limit
        print(f"limit {outcome.limit / 2**20:,.0f} MiB", flush=True)
        sampling, began = asyncio.create_task(_sample(quire, outcome)), time.monotonic()
        await traffic.run(streams, seconds)
        outcome.seconds = round(time.monotonic() - began, 1)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
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
    if not outcome.seconds_short:
        outcome.errors.append("memory was never short: nothing is shown")
    if outcome.most_used_share > 1:
        outcome.errors.append("memory went beyond the limit")
    return outcome


def measure(
    streams: int, seconds: float, num_blocks: int = _NUM_BLOCKS, thresholds: Mapping[str, str] | None = None
) -> Outcome:
    """Runs the deployment below its limit, and the load on it. `thresholds` are other settings than the defaults."""
    # Otherwise tokens may depend on how a prompt is split, as on what is cached.
    settings = {"QUIRE_NUM_BLOCKS": str(num_blocks), "QUIRE_DETERMINISTIC": "true", **(thresholds or {})}
    settings["QUIRE_PREEMPTION"] = "swap"  # wherever the host has room, which is beyond the limit
    prepare_model()
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
        with running_quire("quire", settings, supervisor=command) as quire:
            return uvloop.run(load(quire, cgroup, streams, seconds))


def main() -> None:
    """Parses the flags, measures, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, default %(default)s")
    parser.add_argument("--streams", type=int, default=48, help="at a time, default %(default)s")
    options = parser.parse_args()
    outcome = measure(options.streams, options.seconds)
    for error in outcome.errors:
        print(f"error: {error}", flush=True)
    print(json.dumps({**asdict(outcome), "errors": len(outcome.errors)}))
    sys.exit(1 if outcome.errors else 0)


if __name__ == "__main__":
    main()
