"""`quire embed`: vectors of texts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.interruptible import collected
from quire_client.cli.texts import Texts, TruncateTexts, answers, total, write_answers
from quire_client.embed_requests import EmbedOptions
from quire_client.sync import Client
from quire_client.value_results import Embeddings


def embed(
    texts: Texts = None,
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
    truncate_prompt_tokens: TruncateTexts = None,
    priority: opt.Priority = None,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Write the vector of each text as a line of numbers with spaces between them, in the order of the texts.

    Each line of a file or of standard input is a text, and an empty one is refused.
    """
    options: EmbedOptions = {
        "model": model,
        "dimensions": dimensions,
        "pooling": None if pooling is None else pooling.value,
        "normalize": normalize,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "priority": priority,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:

        def call(some: Sequence[str]) -> Embeddings:
            return collected(partial(client.embed, some, **options), client)

        write_answers(answers(call, texts, file), output, _print_vectors, _joined)


def _print_vectors(answer: Embeddings) -> None:
    for vector in answer.vectors:
        print(*(f"{number:.9g}" for number in vector))  # as many digits as a 32-bit float has


def _joined(parts: Sequence[Embeddings]) -> Embeddings:
    vectors = tuple(vector for part in parts for vector in part.vectors)
    return Embeddings(parts[0].model, vectors, total(part.usage for part in parts))
