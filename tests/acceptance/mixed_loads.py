"""An LLM and an embedding model on one machine: one tenant floods either of them, and another one's chats and single
texts are answered soon nevertheless. Limits and budgets of keys hold for both kinds of calls together.

    python -m tests.acceptance.mixed_loads [--chats 300] [--share 0.15] [--calls 16] [--jobs 64] [--flood-seconds 20]

The real models, with the product's defaults. The chats need a share of the tokens that the LLM computes alone, and a
single text of about 200 tokens is sent for each chat. Both are measured alone, beside a flood of texts (calls of 64
long ones, always as many) and beside a flood of jobs (as in `flood`).

Each endpoint has a worker of its own. Workers share the machine's processors, and the OS gives each busy one the same
time. So with two endpoints everything takes at most twice as long, besides what a flood may do within an endpoint: the
p99 of chats' first tokens, and of the latencies of single texts, are at most 2 × 1.5 times those alone, plus 3 mean
steps of their endpoint beside the flood.

The last line is JSON. Exits with 1 if a p99 is above its bound, or a limit does not hold.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self

import httpx
import uvloop

from benchmarks.deployment import prepare_model
from benchmarks.embeddings.environments import model_directory
from benchmarks.texts import write_text
from deployment import Deployment, deployment
from quire_client.bench.latency import percentile
from tests.acceptance import mixed_limits
from tests.acceptance.flood import CHAT_TOKENS, KEY_FILE, KEYS, Traffic, WorkerTimes
from tests.acceptance.mixed_limits import MODEL_OF_TEXTS

NUM_ENDPOINTS = 2
_WORDS = (160, 180)  # of a text: about 200 tokens
_TEXTS_OF_A_CALL = 64
_SETTLING_SECONDS = 5.0
_TIMEOUT = 300  # seconds


class MixedTraffic(Traffic):
    """Chats, jobs and texts."""

    def __init__(self, running: Deployment, seed: int) -> None:
        super().__init__(running.grpc, seed)
        self._texts = random.Random(seed)
        self._http = {
            tenant: httpx.AsyncClient(
                base_url=running.http, headers={"authorization": f"Bearer {key}"}, timeout=_TIMEOUT
            )
            for tenant, key in KEYS.items()
        }
        self.num_flood_texts = 0

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(client.aclose() for client in self._http.values()))
        await super().__aexit__(*exc)

    async def single_texts(self, count: int, rate: float) -> list[float]:
        """Sends `count` calls with one text at random times, `rate` a second. Returns their latencies in seconds."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(count):
                await asyncio.sleep(self._texts.expovariate(rate))
                tasks.append(group.create_task(self._embed("chats", 1)))
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def flood_of_texts(self, num_calls: int) -> AsyncIterator[None]:
        """So many calls run until the end of `async with`. One that fails ends it with an ExceptionGroup."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._flood_calls()) for _ in range(num_calls)]
            yield
            for task in tasks:
                task.cancel()

    async def _flood_calls(self) -> None:
        while True:
            await self._embed("jobs", _TEXTS_OF_A_CALL)
            self.num_flood_texts += _TEXTS_OF_A_CALL

    async def _embed(self, tenant: str, num_texts: int) -> float:
        texts = [write_text(self._texts, number, self._texts.randint(*_WORDS)) for number in range(num_texts)]
        body = {"model": MODEL_OF_TEXTS, "input": texts, "truncate_prompt_tokens": -1, "encoding_format": "base64"}
        sent = monotonic()
        (await self._http[tenant].post("/v1/embeddings", json=body)).raise_for_status()
        return monotonic() - sent


@dataclass
class Latencies:
    """Of the quiet tenant, in seconds and ascending, and the mean steps of both workers meanwhile."""

    chats: list[float]
    texts: list[float]
    llm_step: float
    encoder_step: float

    def bounds(self, alone: "Latencies") -> tuple[float, float]:
        """The highest p99 of chats and of texts, by those without a flood."""
        chats = NUM_ENDPOINTS * 1.5 * percentile(alone.chats, 99) + 3 * self.llm_step
        texts = NUM_ENDPOINTS * 1.5 * percentile(alone.texts, 99) + 3 * self.encoder_step
        return chats, texts


@dataclass
class Measurement:
    """The quiet tenant's chats and texts, alone and beside floods."""

    running: Deployment
    num_chats: int
    rate: float
    found: dict[str, Latencies] = field(default_factory=dict)

    async def measure(self, where: str, traffic: MixedTraffic, flood: AbstractAsyncContextManager[None]) -> None:
        """Sends the chats and texts beside a flood."""
        workers: Sequence[str] = self.running.state["worker_metrics"]
        async with flood:
            await asyncio.sleep(_SETTLING_SECONDS)
            before = [WorkerTimes.now(address) for address in workers]
            chats, texts = await asyncio.gather(
                traffic.chats(self.num_chats, self.rate), traffic.single_texts(self.num_chats, self.rate)
            )
            steps = [
                WorkerTimes.now(address).since(first).mean_step for address, first in zip(workers, before, strict=True)
            ]
        found = self.found[where] = Latencies(sorted(chats), sorted(texts), *steps)
        print(
            f"{where}: first token of chats p50 {percentile(found.chats, 50):.3f} s, p99 "
            f"{percentile(found.chats, 99):.3f} s; single texts p50 {percentile(found.texts, 50):.3f} s, p99 "
            f"{percentile(found.texts, 99):.3f} s; steps {found.llm_step:.3f} s and {found.encoder_step:.3f} s",
            flush=True,
        )

    def summary(self) -> dict[str, float]:
        """Percentiles and bounds, in seconds."""
        summary = {"chats": float(self.num_chats), "chats_per_second": self.rate}
        for where, found in self.found.items():
            bounds = found.bounds(self.found["alone"])
            for kind, times, bound in (("chats", found.chats, bounds[0]), ("texts", found.texts, bounds[1])):
                name = f"{kind} {where}"
                summary |= {f"{name} p50": percentile(times, 50), f"{name} p99": percentile(times, 99)}
                if where != "alone":
                    summary[f"{name} bound"] = bound
        return summary

    def errors(self) -> list[str]:
        """The percentiles above their bounds."""
        errors = []
        for where, found in self.found.items():
            for kind, times, bound in zip(
                ("chats", "texts"), (found.chats, found.texts), found.bounds(self.found["alone"]), strict=True
            ):
                if where != "alone" and percentile(times, 99) > bound:
                    errors.append(f"{kind} {where}: p99 {percentile(times, 99):.3f} s, and the bound is {bound:.3f} s")
        return errors


async def run(running: Deployment, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What was measured, and what is wrong."""
    llm: str = running.state["worker_metrics"][0]
    async with MixedTraffic(running, seed=1) as traffic:
        async with traffic.flood(options.jobs):
            await asyncio.sleep(options.flood_seconds)
            before = WorkerTimes.now(llm)
            await asyncio.sleep(options.flood_seconds)
            alone = WorkerTimes.now(llm).since(before).tokens_per_second
        print(f"jobs alone: {alone:.0f} tokens/s", flush=True)
        measurement = Measurement(running, options.chats, options.share * alone / CHAT_TOKENS)
        await measurement.measure("alone", traffic, nullcontext())
        await measurement.measure("beside texts", traffic, traffic.flood_of_texts(options.calls))
        await measurement.measure("beside jobs", traffic, traffic.flood(options.jobs))
    spent = await mixed_limits.spend_budget(running.http, options.budget_seconds)
    errors = measurement.errors() + mixed_limits.budget_errors(spent)
    errors += await mixed_limits.limit_errors(running.http, running.state["worker_metrics"][1])
    return {
        **measurement.summary(),
        "texts_of_the_flood": traffic.num_flood_texts,
        "budget_issued": spent.issued,
        "budget_of_generations": spent.of_generations,
        "budget_of_embeddings": spent.of_embeddings,
        "budget_most_beyond": max(0.0, spent.most_beyond),
    }, errors


def main() -> None:
    """Parses the flags, measures, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=300, help="and as many single texts; default %(default)s")
    parser.add_argument(
        "--share", type=float, default=0.15, help="of the output tokens of jobs, needed by chats; default %(default)s"
    )
    parser.add_argument("--calls", type=int, default=16, help="of a flood of texts, at a time; default %(default)s")
    parser.add_argument("--jobs", type=int, default=64, help="of a flood of jobs, at a time; default %(default)s")
    parser.add_argument(
        "--flood-seconds", type=float, default=20.0, help="in which only jobs run, twice; default %(default)s"
    )
    parser.add_argument("--budget-seconds", type=float, default=60.0, help="default %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, models = Path(folder, "keys.toml"), Path(folder, "models.toml")
        keys.write_text(KEY_FILE + mixed_limits.KEY_FILE)
        models.write_text(
            f'[[models]]\nmodel = "{prepare_model().path}"\nserved_model_name = "llm"\n'
            f'[[models]]\nmodel = "{model_directory()}"\nserved_model_name = "{MODEL_OF_TEXTS}"\n'
        )
        with deployment(models=str(models), api_keys=str(keys), dtype="bfloat16") as running:
            summary, errors = uvloop.run(run(running, options))
    for error in errors:
        print(error)
    print(json.dumps({**{name: round(value, 4) for name, value in summary.items()}, "errors": len(errors)}))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
