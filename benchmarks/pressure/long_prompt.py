"""Streams at a steady rate, and a long prompt that arrives among them."""

import random
from time import perf_counter

import uvloop

from benchmarks.deployment import running_quire
from benchmarks.pressure.loads import random_tokens
from benchmarks.pressure.report import LongPromptFigures, LongPromptRun
from benchmarks.processes import BenchmarkFailed
from benchmarks.runner import log
from benchmarks.streams import Streams
from quire_client.aio import AsyncClient
from quire_client.bench.latency import Distribution
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import BenchTarget, QuireTarget

NUM_STREAMS = 8
PROMPT_TOKENS = 6_000
STREAM_PROMPT_TOKENS = 32
LEAD_TOKENS = 32  # that each stream has had before its gaps count
ALONE_TOKENS = 256  # of each stream whose gaps count, where nothing is beside
_STREAM_TOKENS = 4_000  # more than are measured; then the stream is closed


def measure_long_prompt(prompt_tokens: int, num_runs: int) -> LongPromptFigures:
    """Streams alone, the prompt alone, and both together, in turns on one deployment that has room for all of it.

    The first turn does not count. Raises BenchmarkFailed, or what the client raises.
    """
    log("a long prompt: starting")
    with running_quire("Quire", {}) as deployment:
        return uvloop.run(_interleave(deployment.gateway, prompt_tokens, num_runs))


async def _interleave(address: str, prompt_tokens: int, num_runs: int) -> LongPromptFigures:
    runs = []
    async with AsyncClient(address) as client:
        for i in range(num_runs + 1):
            run = await run_round(QuireTarget(client), i, prompt_tokens)
            runs.append(run)
            log(
                f"a long prompt: inter-token p99 {run.alone_p99 * 1e3:.1f} ms alone, {run.beside_p99 * 1e3:.1f} ms "
                f"beside it; its first token after {run.first_token_alone:.2f} s, {run.first_token_beside:.2f} s beside"
            )
    return LongPromptFigures(runs[1:])


async def run_round(target: BenchTarget, number: int, prompt_tokens: int) -> LongPromptRun:
    """Everything once, with new prompts. Every second round measures streams alone first."""
    rng = random.Random(f"long prompt {number}")
    if number % 2:
        alone = await _alone(target, rng)
        first_token_beside, beside = await _beside(target, rng, prompt_tokens)
    else:
        first_token_beside, beside = await _beside(target, rng, prompt_tokens)
        alone = await _alone(target, rng)
    by_itself = await target.run(MixRequest(random_tokens(rng, prompt_tokens), 1), lambda count: None)
    return LongPromptRun(
        alone.p50, alone.p99, beside.p50, beside.p99, by_itself.time_to_first_token, first_token_beside
    )


async def _alone(target: BenchTarget, rng: random.Random) -> Distribution:
    async with Streams([(target, request) for request in _stream_requests(rng)]) as streams:
        await streams.advance(LEAD_TOKENS)
        start = perf_counter()
        await streams.advance(ALONE_TOKENS)
        return _distribution(streams.gaps(start, perf_counter()))


async def _beside(target: BenchTarget, rng: random.Random, prompt_tokens: int) -> tuple[float, Distribution]:
    """Time to the first token of a long prompt, and the gaps of streams until then."""
    request = MixRequest(random_tokens(rng, prompt_tokens), 1)
    async with Streams([(target, request) for request in _stream_requests(rng)]) as streams:
        await streams.advance(LEAD_TOKENS)
        sent = await target.run(request, lambda count: None)
        await streams.advance(2)  # the gap that the first token falls into is a gap beside it
        return sent.time_to_first_token, _distribution(streams.gaps(sent.sent, sent.arrivals[0].at))


def _stream_requests(rng: random.Random) -> list[MixRequest]:
    return [MixRequest(random_tokens(rng, STREAM_PROMPT_TOKENS), _STREAM_TOKENS) for _ in range(NUM_STREAMS)]


def _distribution(gaps: list[float]) -> Distribution:
    distribution = Distribution.of(gaps)
    if distribution is None:
        raise BenchmarkFailed("the streams had no token beside the prompt")
    return distribution
