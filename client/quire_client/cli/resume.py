"""`quire resume`: continues the stream of a named request."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.interruptible import chunks, collected
from quire_client.cli.output import print_json, print_resuming, write_text
from quire_client.sync import Client, Stream


def resume(
    request_id: Annotated[str, typer.Argument(metavar="NAME", help="The request_id.")],
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Write the output of a named request, from its beginning.

    Works while it runs, and for an hour after its end.
    """
    with Client(address, api_key=api_key, timeout=timeout) as client:
        stream = client.resume(request_id, on_resume=print_resuming)
        if output is opt.OutputFormat.JSON:
            print_json(collected(stream.collect, client))
        else:
            _write(stream)


def _write(stream: Stream) -> None:
    """Writes the first sequence as it comes, and others at the end."""
    others: defaultdict[int, str] = defaultdict(str)

    def first() -> Iterator[str]:
        for chunk in chunks(stream):
            if chunk.index == 0:
                yield chunk.text
            else:
                others[chunk.index] += chunk.text

    write_text(first())
    for index, text in sorted(others.items()):
        write_text([f"[{index}] {text}"])
