"""`quire embed`: vectors of texts."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.input import read_lines
from quire_client.cli.interruptible import collected
from quire_client.cli.output import print_json
from quire_client.embed_requests import EmbedOptions
from quire_client.errors import QuireError
from quire_client.results import Embeddings, Usage
from quire_client.sync import Client

_INPUTS_PER_CALL = 256
_CHARACTERS_PER_CALL = 2**19  # a message has at most 4 MiB, where a gateway allows no more
_INPUT = re.compile(r"inputs\[(\d+)\].*")


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.", show_default="lines of standard input")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Embed the lines of this file.", exists=True, dir_okay=False),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="How many numbers of each vector, from the first on.", show_default="all")
    ] = None,
    pooling: Annotated[
        opt.PoolingOption | None,
        typer.Option(help="How the hidden states of a text's tokens become its vector.", show_default="the model's"),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Divide vectors by their lengths, or not.", show_default="the model's"
        ),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Keep the first N tokens of each text; -1: as many as fit.",
            show_default="a text that is too long is refused",
        ),
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher runs first.")] = None,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Write the vector of each text as a line of numbers with spaces between them, in the order of the texts.

    Each line of a file or of standard input is a text, and an empty one is refused.
    """
    if texts and file is not None:
        raise typer.BadParameter("takes the place of TEXT: give one of the two", param_hint="--file")
    is_json = output is opt.OutputFormat.JSON
    options: EmbedOptions = {
        "model": model,
        "dimensions": dimensions,
        "pooling": None if pooling is None else pooling.value,
        "normalize": normalize,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "priority": priority,
    }
    parts: list[Embeddings] = []
    num_sent = 0
    with Client(address, api_key=api_key, timeout=timeout) as client:
        for call in _calls(texts or read_lines(file)):
            try:
                answer = collected(partial(client.embed, call, **options), client)
            except QuireError as error:
                source = None if texts else str(file or "standard input")
                raise _located(error, source, num_sent) from error
            num_sent += len(call)
            if is_json:
                parts.append(answer)
            else:
                _print_vectors(answer)
    if not num_sent:
        raise typer.BadParameter("there is none", param_hint="TEXT")
    if is_json:
        print_json(_joined(parts), indent=None)


def _calls(texts: Iterable[str]) -> Iterator[Sequence[str]]:
    """The texts of each call."""
    call: list[str] = []
    num_characters = 0
    for text in texts:
        if call and (len(call) == _INPUTS_PER_CALL or num_characters + len(text) > _CHARACTERS_PER_CALL):
            yield call
            call, num_characters = [], 0
        call.append(text)
        num_characters += len(text)
    if call:
        yield call


def _located(error: QuireError, source: str | None, num_before: int) -> QuireError:
    """The error with the text at fault as its field: a line of `source`, or without one the place of an argument."""
    if error.field is None or (match := _INPUT.fullmatch(error.field)) is None:
        return error
    number = num_before + int(match[1]) + 1
    return replace(error, field=f"{source}, line {number}" if source else f"TEXT {number}")


def _print_vectors(answer: Embeddings) -> None:
    for vector in answer.vectors:
        print(*(f"{number:.9g}" for number in vector))  # as many digits as a 32-bit float has


def _joined(parts: Sequence[Embeddings]) -> Embeddings:
    def add(one: Usage, other: Usage) -> Usage:
        return Usage(one.prompt_tokens + other.prompt_tokens, 0, one.cached_tokens + other.cached_tokens)

    vectors = tuple(vector for part in parts for vector in part.vectors)
    return Embeddings(parts[0].model, vectors, reduce(add, (part.usage for part in parts)))
