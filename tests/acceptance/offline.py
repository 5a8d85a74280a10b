"""`quire.LLM` beside a server: the same greedy tokens, and at least the throughput that 64 streams have.

    python -m tests.acceptance.offline [--prompts 200] [--streams 64] [--runs 3]

The default model in bfloat16, and prompts of the mix, each with its own number of output tokens, end-of-text ignored.
In each run the prompts are sent to a new server, as streams of which so many run at a time, and then given to one call
of `LLM.generate` in a new process. No two prompts begin alike, so no prefix cache takes part.

The last line is JSON. The exit status is 1 if an output differs, or if the median throughput of the runs of `LLM` is
below that of the server.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.deployment import prepare_model, running_quire
from benchmarks.mix import PATH as MIX
from benchmarks.offline.runs import QUIRE, OfflineRun, run_offline
from benchmarks.serving.loads import renewed, warm_up
from quire_client import AsyncClient
from quire_client.bench.mix import MixRequest, read_mix
from svc_common.models import ServedModel


@dataclass
class OfflineOutcome:
    """The throughput of each run in output tokens per second, and the prompts whose outputs differed in one."""

    num_prompts: int
    server_rates: list[float] = field(default_factory=list)
    offline_rates: list[float] = field(default_factory=list)
    different: set[int] = field(default_factory=set)

    @property
    def ratio(self) -> float:
        """The throughput of `LLM` over that of the server, medians."""
        return median(self.offline_rates) / median(self.server_rates)

    @property
    def errors(self) -> list[str]:
        """What is wrong."""
        found = [f"prompt {number} has other tokens" for number in sorted(self.different)]
        if self.ratio < 1:
            found.append(f"LLM has {self.ratio:.3f} of the server's throughput")
        return found

    def compare(self, server: OfflineRun, offline: OfflineRun) -> None:
        """Adds a run of each."""
        self.server_rates.append(server.tokens_per_second)
        self.offline_rates.append(offline.tokens_per_second)
        pairs = zip(server.token_ids, offline.token_ids, strict=True)
        self.different |= {number for number, (one, other) in enumerate(pairs) if one != other}

    def summary(self) -> dict[str, Any]:
        """The last line of the output."""
        return {
            "prompts": self.num_prompts,
            "different": len(self.different),
            "server_tokens_per_second": [round(rate) for rate in self.server_rates],
            "offline_tokens_per_second": [round(rate) for rate in self.offline_rates],
            "ratio": round(self.ratio, 3),
        }


async def _run_streams(client: AsyncClient, requests: Sequence[MixRequest], num_streams: int) -> OfflineRun:
    token_ids: list[list[int]] = [[] for _ in requests]
    waiting = iter(enumerate(requests))

    async def read_one_after_another() -> None:
        for number, request in waiting:
            stream = client.stream(
                request.prompt_token_ids, max_tokens=request.output_tokens, temperature=0, ignore_eos=True, resume=False
            )
            async for chunk in stream:
                token_ids[number] += chunk.token_ids

    began = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(read_one_after_another())
    return OfflineRun(perf_counter() - began, token_ids)


async def _run_server(address: str, requests: Sequence[MixRequest], num_streams: int) -> OfflineRun:
    async with AsyncClient(address) as client:
        await _run_streams(client, warm_up(), 1)
        return await _run_streams(client, requests, num_streams)


def compare(model: ServedModel, requests: Sequence[MixRequest], num_streams: int, num_runs: int) -> OfflineOutcome:
    """Runs server and class in turns."""
    outcome = OfflineOutcome(len(requests))
    for _ in range(num_runs):
        with running_quire("Quire", {}) as deployment:
            server = uvloop.run(_run_server(deployment.gateway, requests, num_streams))
        outcome.compare(server, run_offline(QUIRE, model.path, requests))
        print(json.dumps(outcome.summary()), flush=True)
    return outcome


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="default %(default)s")
    parser.add_argument("--streams", type=int, default=64, help="of the server, default %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="default %(default)s")
    options = parser.parse_args()
    model = prepare_model()
    requests = renewed(read_mix(MIX), 0, options.prompts)
    outcome = compare(model, requests, options.streams, options.runs)
    for error in outcome.errors:
        print(error)
    print(json.dumps(outcome.summary()))
    sys.exit(1 if outcome.errors else 0)


if __name__ == "__main__":
    main()
