"""A tenant's long jobs take all slots and blocks; another tenant's chats get their first tokens soon nevertheless.

    python -m tests.acceptance.flood [--chats 500] [--share 0.25] [--jobs 100] [--flood-seconds 20]

The real model, with the product's defaults. There are always as many jobs: one that ends is replaced. A job has 500 to
4,000 output tokens, one to four sequences, and any priority that its key allows. The jobs run alone first, which shows
how many tokens the machine computes. The chats need a share of these, which is below the half that is theirs. They run
alone, and then beside the jobs. Steps get longer with the texts of the jobs, so there the chats come in five parts, and
the jobs are measured by themselves before and after each. With the defaults all of it takes about 10 minutes.

The last line is JSON. Exits with 1 if the device waited 3 % of the time, or if one chat in a hundred waits for its
first token longer than 1.5 times the p99 alone (`bound`) plus three mean steps of the jobs alone, those before and
after its part.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

import uvloop

from benchmarks.deployment import Deployment, running_quire, scrape
from quire_client import AsyncClient
from quire_client.bench.latency import percentile

KEYS = {"chats": "flood-key-of-the-chats", "jobs": "flood-key-of-the-jobs"}
KEY_FILE = "".join(f'[[keys]]\nkey = "{key}"\ntenant = "{tenant}"\n' for tenant, key in KEYS.items())
_JOB_TOKENS = (500, 1000, 2000, 4000, 4000, 4000)
_PRIORITIES = (0, 0, -1, -7)
_SEQUENCES = (1, 2, 4)
_CHAT_PROMPT, _CHAT_OUTPUT = (16, 64), (8, 32)
CHAT_TOKENS = (sum(_CHAT_PROMPT) + sum(_CHAT_OUTPUT)) / 2  # on average
NUM_STEPS = 3  # until a first token: one until a slot is free, two in flight
NUM_PARTS = 5
MAX_IDLE_SHARE = 0.03


@dataclass(frozen=True)
class WorkerTimes:
    """Counters of the worker: steps, seconds with and without one on the device, and output tokens."""

    steps: float
    busy: float
    idle: float
    tokens: float

    @property
    def mean_step(self) -> float:
        """Seconds."""
        return self.busy / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Output tokens in a second."""
        return self.tokens / (self.busy + self.idle)

    @classmethod
    def now(cls, address: str) -> "WorkerTimes":
        """Reads a worker's metrics."""
        page = scrape(address, "kind")
        return cls(
            steps=page["quire_worker_steps_total", ""],
            busy=page["quire_worker_busy_seconds_total", ""],
            idle=page["quire_worker_idle_seconds_total", ""],
            tokens=page["quire_worker_tokens_total", "decode"],
        )

    def since(self, before: "WorkerTimes") -> "WorkerTimes":
        """What was added."""
        return WorkerTimes(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


class Traffic:
    """Sends chats and jobs of random tokens, which no cache has seen."""

    def __init__(self, gateway: str, seed: int, worker_metrics: str | None = None) -> None:
        """`gateway` is host:port of its gRPC API. With that of a worker's metrics, chats note what steps they met."""
        self._clients = {tenant: AsyncClient(gateway, api_key=key) for tenant, key in KEYS.items()}
        self._rng = random.Random(seed)
        self._vocab_size = 0
        self.num_jobs_ended = 0
        self._worker_metrics = worker_metrics
        self.met_steps: list[WorkerTimes] = []
        """Of each chat, the steps until its first token."""

    async def __aenter__(self) -> "Traffic":
        self._vocab_size = (await self._clients["chats"].models())[0].vocab_size
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def chats(self, count: int, rate: float) -> list[float]:
        """Sends `count` chats at random times, `rate` a second. Returns their times to the first token."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(count):
                await asyncio.sleep(self._rng.expovariate(rate))
                tasks.append(
                    group.create_task(self._chat(self._prompt(*_CHAT_PROMPT), self._rng.randint(*_CHAT_OUTPUT)))
                )
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def flood(self, num_jobs: int) -> AsyncIterator[None]:
        """So many jobs run until the end of `async with`. A job that fails ends it with an ExceptionGroup."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._jobs()) for _ in range(num_jobs)]
            yield
            for task in tasks:
                task.cancel()

    async def _jobs(self) -> None:
        """Sends one job after another, and reads each to its end."""
        while True:
            options: dict[str, Any] = {"n": self._rng.choice(_SEQUENCES), "priority": self._rng.choice(_PRIORITIES)}
            prompt = self._prompt(256, 2048)
            options["max_tokens"] = self._rng.choice(_JOB_TOKENS)
            async for _ in self._clients["jobs"].stream(prompt, ignore_eos=True, **options):
                pass
            self.num_jobs_ended += 1

    async def _chat(self, prompt: Sequence[int], max_tokens: int) -> float:
        before = await self._times()
        sent, first = monotonic(), None
        async for chunk in self._clients["chats"].stream(prompt, max_tokens=max_tokens, ignore_eos=True):
            if first is None and chunk.token_ids:
                first = monotonic() - sent
                if before is not None and (after := await self._times()) is not None:
                    self.met_steps.append(after.since(before))
        assert first is not None, "a chat has no token"
        return first

    async def _times(self) -> WorkerTimes | None:
        address = self._worker_metrics
        return None if address is None else await asyncio.to_thread(WorkerTimes.now, address)

    def _prompt(self, shortest: int, longest: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randint(shortest, longest))]


async def measure(
    quire: Deployment, num_chats: int, share: float, num_jobs: int, flood_seconds: float
) -> dict[str, Any]:
    """Runs the jobs alone, the chats alone, both, and the jobs alone again."""

    async def steps_of_jobs() -> WorkerTimes:
        """The worker's times while only jobs run."""
        before = WorkerTimes.now(quire.worker_metrics)
        await asyncio.sleep(flood_seconds)
        times = WorkerTimes.now(quire.worker_metrics).since(before)
        print(f"jobs alone: {times.tokens_per_second:.0f} tokens/s, a step takes {times.mean_step:.3f} s", flush=True)
        return times

    async def timed_chats(where: str, num_chats: int) -> list[float]:
        times = sorted(await traffic.chats(num_chats, rate))
        print(f"chats {where}: p50 {percentile(times, 50):.3f} s, p99 {percentile(times, 99):.3f} s", flush=True)
        return times

    async with Traffic(quire.gateway, 1, quire.worker_metrics) as traffic:
        async with traffic.flood(num_jobs):
            await asyncio.sleep(flood_seconds)  # until their prompts are computed, and they hold all slots
            first = await steps_of_jobs()
        rate = share * first.tokens_per_second / CHAT_TOKENS
        alone = await timed_chats("alone", num_chats)
        async with traffic.flood(num_jobs):
            await asyncio.sleep(flood_seconds)
            traffic.met_steps.clear()
            begun, mean_steps = WorkerTimes.now(quire.worker_metrics), [(await steps_of_jobs()).mean_step]
            beside: list[float] = []
            beyond: list[float] = []
            for _ in range(NUM_PARTS):
                waits = await timed_chats("beside jobs", num_chats // NUM_PARTS)
                mean_steps.append((await steps_of_jobs()).mean_step)
                beside += waits
                beyond += [wait - NUM_STEPS * mean(mean_steps[-2:]) for wait in waits]
            both = WorkerTimes.now(quire.worker_metrics).since(begun)
    beside.sort()
    num_steps = sorted(met.steps for met in traffic.met_steps)
    met_steps = sorted(met.mean_step for met in traffic.met_steps if met.steps)
    return {
        "chats": num_chats,
        "chats_per_second": rate,
        "jobs": num_jobs,
        "jobs_that_ended": traffic.num_jobs_ended,
        "alone_p50": percentile(alone, 50),
        "alone_p99": percentile(alone, 99),
        "beside_p50": percentile(beside, 50),
        "beside_p99": percentile(beside, 99),
        "mean_step_first": mean_steps[0],
        "mean_step_last": mean_steps[-1],
        "steps_p50": percentile(num_steps, 50),
        "steps_p99": percentile(num_steps, 99),
        "met_step_p99": percentile(met_steps, 99),
        "beyond_three_steps_p99": percentile(sorted(beyond), 99),
        "bound": 1.5 * percentile(alone, 99),
        "idle_share": both.idle / (both.busy + both.idle),
    }


def main() -> None:
    """Parses the flags, measures, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the output tokens of jobs, needed by chats; default %(default)s"
    )
    parser.add_argument("--jobs", type=int, default=100, help="at a time, default %(default)s")
    parser.add_argument(
        "--flood-seconds", type=float, default=20.0, help="in which only jobs run, nine times; default %(default)s"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(KEY_FILE)
        with running_quire("quire", {"QUIRE_API_KEYS": str(keys)}) as quire:
            result = uvloop.run(measure(quire, options.chats, options.share, options.jobs, options.flood_seconds))
    passed = result["beyond_three_steps_p99"] <= result["bound"] and result["idle_share"] < MAX_IDLE_SHARE
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
