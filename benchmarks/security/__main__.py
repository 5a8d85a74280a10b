"""Measures what mutual TLS, TLS for clients and limits of API keys cost streams (`make bench-security`).

    python -m benchmarks.security [--starts 4] [--pairs 3] [--tokens 256] [--parts tls,limits] [--output FILE]

Two deployments of the real model run at the same time, one without and one with all of that. 64 streams of 8 tenants
decode on one of them, while the other is idle; then the same requests go to the other one. Only the time in which all
64 streams decode counts. Pairs take turns as to which deployment is first, and both are started anew for each --starts,
each with --pairs pairs over gRPC and as many over HTTP. With the defaults it takes about ten minutes; one pair,
`--starts 1 --pairs 1 --tokens 128`, about two. The targets are in report.py. Only the defaults' parts and sizes replace
the result.
"""

import asyncio
import random
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.deployment import prepare_model, scrape
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, log, make_parser, publish
from benchmarks.security.report import FigurePair, StreamFigures, judge, security_table, summarize
from benchmarks.security.variants import NUM_TENANTS, Part, Protocol, RunningVariant, make_variants, title_of
from benchmarks.streams import Streams
from benchmarks.texts import write_tokens
from quire_client.bench.latency import Distribution
from quire_client.bench.mix import MixRequest
from svc_common.models import ServedModel

RESULT = RESULTS / "security.json"
NUM_STREAMS = 64  # a worker on a CPU runs at least as many at a time
PROMPT_TOKENS = 32
LEAD_TOKENS = 32  # of each stream before its gaps count: all of them decode by then
WARM_UP_TOKENS = 40
NUM_STARTS, NUM_PAIRS, NUM_TOKENS = 4, 3, 256
_FIRST_NUMBER = 1000
_SPARE_TOKENS = 1000  # that the first streams may be ahead of the last one
_IDLE_SECONDS = 60


class Prompts:
    """Prompts that no deployment has seen: no two begin with the same number."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._number = _FIRST_NUMBER
        self._rng = random.Random("security")

    def take(self) -> list[tuple[int, ...]]:
        """One for each stream."""
        self._number += NUM_STREAMS
        return [
            tuple(write_tokens(self._rng, self._tokenizer, self._number - i, PROMPT_TOKENS))
            for i in range(1, NUM_STREAMS + 1)
        ]


async def run_streams(
    running: RunningVariant, protocol: Protocol, prompts: Sequence[tuple[int, ...]], num_tokens: int
) -> StreamFigures:
    """Sends a request for each prompt, and measures `num_tokens` tokens of each stream. Raises BenchmarkFailed.

    Processor time for a token is that of the same time; that for a token with its part of the request, which falls with
    the number of tokens, is measured from before the requests until after their ends.
    """
    at_first = running.processor_seconds()
    async with running.targets(protocol) as targets:
        requests = [MixRequest(prompt, LEAD_TOKENS + num_tokens + _SPARE_TOKENS) for prompt in prompts]
        calls = [(targets[i % len(targets)], request) for i, request in enumerate(requests)]
        async with Streams(calls) as streams:
            await streams.advance(LEAD_TOKENS)
            before = await asyncio.to_thread(running.processor_seconds)
            start, num_before = perf_counter(), streams.num_tokens
            await streams.advance(num_tokens)
            end, num_measured = perf_counter(), streams.num_tokens - num_before
            after = await asyncio.to_thread(running.processor_seconds)
            found = Distribution.of(streams.gaps(start, end))
            num_all = streams.num_tokens
    await wait_until_idle(running)
    at_last = running.processor_seconds()
    if found is None:
        raise BenchmarkFailed(f"{running.variant.title}: no stream had two tokens")
    return StreamFigures(
        found.p50,
        found.p99,
        num_measured / (end - start),
        (after.gateway - before.gateway) / num_measured,
        (after.scheduler - before.scheduler) / num_measured,
        (at_last.gateway - at_first.gateway) / num_all,
    )


async def wait_until_idle(running: RunningVariant) -> None:
    """Returns when no sequence is left. Raises BenchmarkFailed."""
    deadline = perf_counter() + _IDLE_SECONDS
    while perf_counter() < deadline:
        page = scrape(running.deployment.scheduler_metrics)
        if not page["quire_sequences_running", ""] + page["quire_sequences_waiting", ""]:
            return
        await asyncio.sleep(0.1)
    raise BenchmarkFailed(f"{running.variant.title}: sequences run {_IDLE_SECONDS} s after their streams were closed")


async def measure_start(
    without: RunningVariant, with_parts: RunningVariant, prompts: Prompts, pairs_of_start: range, num_tokens: int
) -> dict[str, list[FigurePair]]:
    """Pairs by protocol, of two deployments that have just started. An odd pair is measured without the parts first."""
    pairs: dict[str, list[FigurePair]] = {protocol: [] for protocol in Protocol}
    for protocol in Protocol:
        for running in (without, with_parts):
            await run_streams(running, protocol, prompts.take(), WARM_UP_TOKENS)
    for pair in pairs_of_start:
        for protocol in Protocol:
            sent = prompts.take()
            ordered = (without, with_parts) if pair % 2 else (with_parts, without)
            figures = {running: await run_streams(running, protocol, sent, num_tokens) for running in ordered}
            pairs[protocol].append(FigurePair(figures[without], figures[with_parts]))
            log(describe(protocol, pairs[protocol][-1]))
    return pairs


def describe(protocol: Protocol, pair: FigurePair) -> str:
    """A line of progress."""
    p50, p99 = (
        f"{getattr(pair.without, name) * 1e3:.1f} ms, with {getattr(pair.with_parts, name) * 1e3:.1f} ms"
        for name in ("inter_token_p50", "inter_token_p99")
    )
    return f"{protocol}: inter-token p50 {p50}; p99 {p99}"


def measure(
    model: ServedModel, parts: Sequence[Part], num_starts: int, num_pairs: int, num_tokens: int
) -> dict[str, list[FigurePair]]:
    """Pairs by protocol. Raises BenchmarkFailed, or a client's error."""
    prompts = Prompts(Tokenizer.from_file(str(model.path / "tokenizer.json")))
    variants = make_variants(parts)
    pairs: dict[str, list[FigurePair]] = {protocol: [] for protocol in Protocol}
    for start in range(num_starts):
        log(f"start {start + 1} of {num_starts}")
        with TemporaryDirectory(prefix="quire-security-") as folder, ExitStack() as stack:
            # The one that starts first may get better memory.
            running = {
                variant: stack.enter_context(variant.running(Path(folder, str(i)), model.name))
                for i, variant in enumerate(variants if start % 2 else reversed(variants))
            }
            without, with_parts = (running[variant] for variant in variants)
            pairs_of_start = range(start * num_pairs, (start + 1) * num_pairs)
            found = uvloop.run(measure_start(without, with_parts, prompts, pairs_of_start, num_tokens))
        for protocol in Protocol:
            pairs[protocol] += found[protocol]
    return pairs


def main() -> None:
    """Exits with 1 where there are no figures; a missed target does not change the status."""
    parser = make_parser(__doc__, RESULT, ", for the defaults")
    parser.add_argument("--starts", type=int, default=NUM_STARTS, help="default %(default)s")
    parser.add_argument(
        "--pairs", type=int, default=NUM_PAIRS, help="of each protocol, for each start; default %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of each stream; default %(default)s")
    parser.add_argument("--parts", default=",".join(Part), help="what one deployment has; default %(default)s")
    options = parser.parse_args()
    if unknown := [part for part in options.parts.split(",") if part not in list(Part)]:
        parser.error(f"argument --parts: no part named {unknown[0]!r}")
    sizes = options.starts, options.pairs, options.tokens
    if min(sizes) < 1:
        parser.error("--starts, --pairs and --tokens are at least 1")
    parts = [part for part in Part if part in options.parts.split(",")]
    with failures_exit("security"):
        model = prepare_model()
        protocols = summarize(measure(model, parts, *sizes))
    result: dict[str, Any] = {
        **provenance("torch", "grpcio", "uvloop"),
        "command": shlex.join(["python", "-m", "benchmarks.security", *sys.argv[1:]]),
        "model": model.name,
        "measured": title_of(parts),
        "num_streams": NUM_STREAMS,
        "num_tenants": NUM_TENANTS,
        "num_starts": options.starts,
        "num_pairs": options.starts * options.pairs,
        "measured_tokens": options.tokens,
        "protocols": protocols,
        "targets": judge(protocols),
    }
    is_whole = sizes == (NUM_STARTS, NUM_PAIRS, NUM_TOKENS) and parts == list(Part)
    publish(
        result,
        options.output or (RESULT if is_whole else None),
        {"Streams with TLS and limits": security_table(result)},
    )


if __name__ == "__main__":
    main()
