"""Puts the systems under the loads, one after the other, each started afresh for each run."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from benchmarks.serving.figures import Figures
from benchmarks.serving.kv_waste import KvUse
from benchmarks.serving.loads import ServingLoad, warm_up
from benchmarks.serving.systems import Endpoint, System
from quire_client.bench.latency import RequestTimings, TokenArrival, summarize
from quire_client.bench.load import run_load
from quire_client.bench.targets import OpenAITarget, http_client

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a load came to. `kv_wasted` is the share of slots in used blocks without a token, where it is told."""

    figures: Figures
    kv_wasted: float | None = None


def run_system(system: System, loads: Sequence[ServingLoad], report: Report) -> dict[str, Outcome]:
    """Starts a system, warms it up, sends the loads in turn, and stops it. Raises BenchmarkFailed."""
    report(f"{system.title}: starting")
    with system.running() as endpoint:
        # The load generator shares the processors with what it measures: a lighter event loop.
        return uvloop.run(_send(system, endpoint, loads, report))


async def _send(system: System, endpoint: Endpoint, loads: Sequence[ServingLoad], report: Report) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    async with http_client(endpoint.url, None, None) as http:
        await run_load(OpenAITarget(endpoint.url, http), warm_up(), 1)
    for load in loads:
        before = KvUse.read(endpoint.metrics) if endpoint.metrics else None
        # Connections of its own: servers close those that idle, as most of a load's do in the next one.
        async with http_client(endpoint.url, None, None) as http:
            sent = await run_load(OpenAITarget(endpoint.url, http), load.requests, load.concurrency)
        if sent.failures or sent.num_short or sent.summary is None:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in sent.failures.items())
            wrong = f"{sent.num_short} requests of a wrong length; failed: {reasons or 'none'}"
            raise BenchmarkFailed(f"{system.title}, {load.title}: {wrong}")
        figures = Figures.of(sent.summary)
        wasted = KvUse.read(endpoint.metrics).wasted_since(before) if endpoint.metrics and before else None
        outcomes[load.name] = Outcome(figures, wasted)
        report(f"{system.title}: {load.title}: {figures.output_tokens_per_second:,.1f} output tokens/s")
    return outcomes


def run_static_batches(model: Path, load: ServingLoad, report: Report) -> dict[str, Outcome]:
    """The load's requests by transformers' `generate`, eight at a time, in a process that has the machine to itself."""
    report("static batches: starting")
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
    report(f"static batches: {figures.output_tokens_per_second:,.1f} output tokens/s")
    return {load.name: Outcome(figures)}
