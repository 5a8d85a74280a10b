"""Sends the loads to a system that is started for them, and measures how full its KV blocks are."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvloop
from aiohttp import ClientSession

from benchmarks.deployment import scrape
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from benchmarks.runner import check_load, log
from benchmarks.serving.loads import ServingLoad, warm_up
from benchmarks.serving.report import Figures
from benchmarks.serving.systems import Endpoint, System
from quire_client.bench.latency import RequestTimings, TokenArrival, summarize
from quire_client.bench.load import run_load
from quire_client.bench.targets import OpenAITarget
from quire_client.http_client import http_client

IDLE_SECONDS = 5.0
"""How long a system is idle before each load but the first, which is sent right after the start. Quire takes memory for
its cache then: on a virtual machine pages may cost as much as 1.4 s per GiB when they are first written.
"""


@dataclass(frozen=True)
class KvUse:
    """Tokens stored, and slots of the blocks they are in, summed over all steps so far."""

    tokens: float
    slots: float

    @classmethod
    def read(cls, address: str) -> Self:
        """From a scheduler's Prometheus page. Raises BenchmarkFailed where it exports neither."""
        samples = scrape(address)
        return cls(samples["quire_kv_tokens_used_total", ""], samples["quire_kv_slots_used_total", ""])

    def wasted_since(self, before: "KvUse") -> float:
        """The share of slots in used blocks that held no token, over the steps since then."""
        slots = self.slots - before.slots
        if slots <= 0:
            raise BenchmarkFailed("the scheduler counted no KV slots in use")
        return 1 - (self.tokens - before.tokens) / slots


@dataclass(frozen=True)
class Outcome:
    """Figures of a load. `kv_wasted` is the share of slots in used blocks without a token; None where not exported."""

    figures: Figures
    kv_wasted: float | None = None


def run_system(system: System, loads: Sequence[ServingLoad]) -> dict[str, Outcome]:
    """Starts a system, warms it up, sends the loads in turn, and stops it. Raises BenchmarkFailed."""
    log(f"{system.title}: starting")
    with system.running() as endpoint:
        # The load generator shares the processors with the server: uvloop costs less.
        return uvloop.run(_send(system, endpoint, loads))


async def _send(system: System, endpoint: Endpoint, loads: Sequence[ServingLoad]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    async with _client(endpoint) as http:
        await run_load(OpenAITarget(endpoint.url, http), warm_up(), 1)
    for number, load in enumerate(loads):
        if number:
            await asyncio.sleep(IDLE_SECONDS)
        before = KvUse.read(endpoint.metrics) if endpoint.metrics else None
        # New connections: servers close idle ones, and most of the last load's are idle.
        async with _client(endpoint) as http:
            sent = await run_load(OpenAITarget(endpoint.url, http), load.requests, load.concurrency)
        figures = Figures.of(check_load(sent, f"{system.title}, {load.title}"))
        wasted = KvUse.read(endpoint.metrics).wasted_since(before) if endpoint.metrics and before else None
        outcomes[load.name] = Outcome(figures, wasted)
        log(f"{system.title}: {load.title}: {figures.output_tokens_per_second:,.1f} output tokens/s")
    return outcomes


def _client(endpoint: Endpoint) -> ClientSession:
    http = http_client(endpoint.url, None, None)
    if endpoint.closes_connections:
        http.headers["connection"] = "close"
    return http


def run_static_batches(model: Path, load: ServingLoad) -> dict[str, Outcome]:
    """The load's requests by transformers' `generate`, eight at a time, in a process of its own."""
    log("static batches: starting")
    requests = [[list(request.prompt_token_ids), request.output_tokens] for request in load.requests]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.static_batches", "--model", model],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkFailed(f"transformers failed:\n{done.stderr[-2000:]}")
    timelines = [RequestTimings(0.0, tuple(TokenArrival(at, 1) for at in times)) for times in json.loads(done.stdout)]
    figures = Figures.of(summarize(timelines, sum(len(request.prompt_token_ids) for request in load.requests)))
    log(f"static batches: {figures.output_tokens_per_second:,.1f} output tokens/s")
    return {load.name: Outcome(figures)}
