"""`quire bench`: sends a load to a server, or to a model in this process, and measures it."""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.table import Table

from quire_client.aio import AsyncClient
from quire_client.bench.latency import Distribution
from quire_client.bench.load import LoadResult, run_load
from quire_client.bench.mix import MixRequest, read_mix, sample_mix, take
from quire_client.bench.targets import BenchTarget, OpenAITarget, QuireTarget, TargetModel
from quire_client.cli import options as opt
from quire_client.cli.interruptible import run_async
from quire_client.cli.offline import Offline, loading, offline_commands, refuse_beside_offline
from quire_client.cli.output import print_json, print_table
from quire_client.cli.progress import RequestProgress
from quire_client.http_client import http_client, without_login

_DEFAULT_REQUESTS = 48
_WARM_UP_TOKENS = 8
_SHOW_SECONDS = 0.1
"""Between two updates of the number of tokens: each takes longer than a token's way to here."""


def bench(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this OpenAI-style HTTP server instead, by the same definitions.",
            callback=opt.check_url,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", min=1, help="How many.", show_default=f"the mix's own, or {_DEFAULT_REQUESTS}"
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Requests in flight at a time.")] = 16,
    mix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests to send.",
            show_default="random tokens, log-uniform prompts of 16-800 and outputs of 16-256",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the default mix.")] = 0,
    warm_up: Annotated[int, typer.Option(min=0, help="Short requests before the measurement.")] = 1,
    offline: Offline = False,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Send a load to a server, greedy and with exact lengths.

    TTFT: from sending a request to its first token.

    Inter-token latency: gaps between tokens of one stream; k tokens after a gap g count as k gaps of g/k.

    Output tokens/s: all output tokens, over the time from the first request sent to the last token.

    If there are more requests than the mix has, it is repeated: a prefix cache makes repeated prompts cheaper.
    """
    given = read_mix(mix) if mix else None
    if offline:
        refuse_beside_offline(context, "url", "address", "api_key", "timeout")
        commands = offline_commands()
        run, opened, place = commands.run, loading(commands.bench_target(model)), "this process"
    else:
        place = without_login(url) if url else address
        run, opened = run_async, _target(url, address, model, api_key, timeout)

    async def measure() -> tuple[TargetModel, LoadResult]:
        async with opened as target:
            served = await target.model()
            mix = given or sample_mix(seed, requests or _DEFAULT_REQUESTS, served.vocab_size)
            for request in sample_mix(seed + 1, warm_up, served.vocab_size):
                await target.run(replace(request, output_tokens=_WARM_UP_TOKENS), lambda count: None)
            return served, await _run_with_progress(target, take(mix, requests), concurrency)

    served, load = run(measure())
    if output is opt.OutputFormat.JSON:
        _print_json(served, place, concurrency, load)
    else:
        _print_table(f"{served.name} {'in' if offline else 'at'} {place}, {concurrency} requests at a time", load)
    if load.failures or load.num_short:
        _print_failures(load)
        raise typer.Exit(1)


@asynccontextmanager
async def _target(
    url: str | None, address: str, model: str | None, api_key: str | None, timeout: float | None
) -> AsyncIterator[BenchTarget]:
    if url is None:
        async with AsyncClient(address, api_key=api_key, timeout=timeout) as client:
            yield QuireTarget(client, model)
    else:
        async with http_client(url, api_key, timeout, os.environ.get("QUIRE_CA_FILE")) as http:
            yield OpenAITarget(url, http, model)


async def _run_with_progress(target: BenchTarget, requests: Sequence[MixRequest], concurrency: int) -> LoadResult:
    num_tokens, shown_at = 0, 0.0
    with RequestProgress(len(requests), "0 tokens") as progress:

        def on_tokens(count: int) -> None:
            nonlocal num_tokens, shown_at
            num_tokens += count
            if (now := monotonic()) - shown_at > _SHOW_SECONDS:
                shown_at = now
                progress.show(f"{num_tokens:,} tokens")

        def on_end() -> None:
            progress.show(f"{num_tokens:,} tokens")
            progress.advance()

        return await run_load(target, requests, concurrency, on_tokens, on_end)


def _print_json(served: TargetModel, address: str, concurrency: int, load: LoadResult) -> None:
    print_json(
        {
            "model": served.name,
            "address": address,
            "concurrency": concurrency,
            "summary": load.summary,
            "failures": dict(load.failures),
            "num_short": load.num_short,
        }
    )


def _print_table(title: str, load: LoadResult) -> None:
    summary = load.summary
    if summary is None:
        return
    table = Table(box=None)
    for column in ("", "p50", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("time to first token, ms", *_milliseconds(summary.time_to_first_token))
    table.add_row("inter-token latency, ms", *_milliseconds(summary.inter_token))
    print(title)
    print_table(table)
    print(
        f"{summary.output_tokens_per_second:,.1f} output tokens/s, {summary.requests_per_second:,.2f} requests/s: "
        f"{summary.num_requests} requests, {summary.prompt_tokens:,} prompt and {summary.output_tokens:,} output "
        f"tokens in {summary.wall_seconds:,.1f} s"
    )


def _milliseconds(latency: Distribution | None) -> Sequence[str]:
    if latency is None:
        return ("-", "-", "-")
    return [f"{seconds * 1e3:,.1f}" for seconds in (latency.p50, latency.p90, latency.p99)]


def _print_failures(load: LoadResult) -> None:
    for reason, count in load.failures.most_common(3):
        print(f"quire: {count} requests failed: {reason}", file=sys.stderr)
    if load.num_short:
        print(
            f"quire: {load.num_short} requests did not get as many tokens as they asked for: the figures compare "
            "with no other server's",
            file=sys.stderr,
        )
