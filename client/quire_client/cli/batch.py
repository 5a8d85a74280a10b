"""`quire batch`: answers the requests of a file in OpenAI's batch format, and goes on where it was stopped."""

import math
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from quire_client.batch.client import BatchClient
from quire_client.batch.input import STDIN, BatchInput, open_input
from quire_client.batch.output import BatchOutput, open_output
from quire_client.batch.run import run_batch
from quire_client.batch.transport import HttpTransport, Transport
from quire_client.cli import options as opt
from quire_client.cli.interruptible import run_async
from quire_client.cli.offline import Offline, loading, offline_commands, refuse_beside_offline
from quire_client.cli.output import print_json
from quire_client.cli.progress import RequestProgress
from quire_client.http_client import http_client

_CONNECT_SECONDS = 30.0
_NOTICE_SECONDS = 60.0
"""Between two lines that say why requests are sent again."""
_MAX_TEXT = 60  # characters beside a bar


def batch(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Requests, one line of JSON for each, in OpenAI's batch format; - for standard input."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the answers.", show_default="requests.out.jsonl beside it"
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", help="HTTP address of a gateway.", callback=opt.check_url)
    ] = "http://127.0.0.1:8000",
    # A worker on a CPU runs at least as many at once. More wait in the server's queue, and beside others' requests.
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Requests in flight at a time.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            callback=opt.check_timeout,
            help="After so long a request is sent again. One with a name runs on; those of embeddings, scores, "
            "rerankings and tokens, and responses with store: false, begin again, at most 5 times.",
        ),
    ] = 600.0,
    server_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            callback=opt.check_timeout,
            help="End if no call has had a response for so long, and /health has none either; inf: never.",
        ),
    ] = 600.0,
    api_key: opt.ApiKey = None,
    offline: Offline = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="The model that --offline loads. Lines name it, too."),
    ] = None,
) -> int:
    """Answer the requests of a file: one line of output for each, in the order in which they end.

    The same command goes on with a batch that was stopped. Requests that the server refuses have its error in the
    output; those that cannot be answered now are sent again. With --offline requests that were stopped begin again.

    Exits with 1 if the output has errors, or if the batch has to stop.
    """
    started = monotonic()
    if offline:
        refuse_beside_offline(context, "url", "timeout", "server_timeout", "api_key")
    elif model is not None:
        raise typer.BadParameter("is for --offline; the lines name the models of a server", param_hint="--model")
    if output is None:
        if file == STDIN:
            raise typer.BadParameter("is needed where the requests come from standard input", param_hint="--output")
        output = Path(f"{os.path.splitext(file)[0]}.out.jsonl")
    elif str(output) == "-":
        message = "must be a file: its lines say which requests are answered when a batch goes on"
        raise typer.BadParameter(message, param_hint="--output")
    with open_input(file) as requests, open_output(output, requests) as answers:
        num_before = answers.num_answered
        notices = _Notices(requests, answers)
        if offline:
            commands = offline_commands()
            commands.run(_run(notices, loading(commands.batch_transport(model)), concurrency))
        else:
            run_async(_run(notices, _http_transport(url, timeout, server_timeout, api_key), concurrency))
        summary = {
            "input": requests.name,
            "output": str(output),
            "requests": requests.num_requests,
            "answered_before": num_before,
            "errors": answers.num_errors,
            "retries": notices.num_retries,
            "seconds": round(monotonic() - started, 3),
        }
    if as_json:
        print_json(summary)
    else:
        print(f"{requests.num_requests:,} requests, {_errors(answers.num_errors)}: {output}")
    return int(answers.num_errors > 0)


class _Notices:
    """Reports what happens to a batch."""

    def __init__(self, requests: BatchInput, answers: BatchOutput) -> None:
        self.requests = requests
        self.answers = answers
        self.num_retries = 0
        self.progress = RequestProgress(requests.num_requests, _errors(answers.num_errors), answers.num_answered)
        self._noticed_at: float | None = None

    def start(self) -> None:
        """Reports what can be known before the first request."""
        if self.requests.ignored_fields:
            names = ", ".join(list(self.requests.ignored_fields)[:5])
            self.progress.print_line(f"fields of lines that have no effect: {names}")
        if self.answers.num_answered:
            self.progress.print_line(f"{self.answers.num_answered:,} requests are answered already")

    def on_end(self) -> None:
        """A request is answered."""
        self.progress.show(_errors(self.answers.num_errors))
        self.progress.advance()

    def on_retry(self, why: str) -> None:
        """A request is sent again."""
        self.num_retries += 1
        why = " ".join("".join(one if one.isprintable() else " " for one in why).split())
        self.progress.show(f"{_errors(self.answers.num_errors)}, sent again: {why[:_MAX_TEXT]}")
        if self._noticed_at is None or monotonic() - self._noticed_at > _NOTICE_SECONDS:
            self._noticed_at = monotonic()
            self.progress.print_line(f"requests are sent again: {why}")


async def _run(notices: _Notices, opened: AbstractAsyncContextManager[Transport], concurrency: int) -> None:
    notices.start()
    if notices.answers.num_answered == notices.requests.num_requests:
        notices.answers.finish()
        return
    async with opened as transport:
        client = BatchClient(transport, notices.on_retry)
        with notices.progress:
            await run_batch(notices.requests, notices.answers, client, concurrency, notices.on_end)


@asynccontextmanager
async def _http_transport(
    url: str, timeout: float | None, server_timeout: float | None, api_key: str | None
) -> AsyncIterator[HttpTransport]:
    key = api_key or os.environ.get("QUIRE_API_KEY") or None
    ca_file = os.environ.get("QUIRE_CA_FILE")
    async with http_client(url, key, timeout, ca_file, _CONNECT_SECONDS) as http:
        yield HttpTransport(url, http, math.inf if server_timeout is None else server_timeout)


def _errors(count: int) -> str:
    return f"{count:,} error" if count == 1 else f"{count:,} errors"
