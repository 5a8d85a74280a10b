"""`quire classify`: labels of texts."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quire_client.classify_requests import ClassifyOptions
from quire_client.cli import options as opt
from quire_client.cli.interruptible import collected
from quire_client.cli.output import write_text
from quire_client.cli.texts import Texts, TruncateTexts, answers, total, write_answers
from quire_client.sync import Client
from quire_client.value_results import Classifications

_SPACE = re.compile(r"\s")  # which ends lines and fields, too


def classify(
    texts: Texts = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Classify the lines of this file.", exists=True, dir_okay=False
        ),
    ] = None,
    raw_scores: Annotated[
        bool, typer.Option("--raw-scores", help="Leave out the activation function of the model's head.")
    ] = False,
    truncate_prompt_tokens: TruncateTexts = None,
    priority: opt.Priority = None,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Write a line for each text, in their order: the numbers of the labels, the highest first, each after its label.

    Each line of a file or of standard input is a text, and an empty one is refused.
    """
    options: ClassifyOptions = {
        "model": model,
        "raw_scores": raw_scores,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "priority": priority,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:

        def call(some: Sequence[str]) -> Classifications:
            return collected(partial(client.classify, some, **options), client)

        write_answers(answers(call, texts, file), output, _print_labels, _joined)


def _print_labels(answer: Classifications) -> None:
    labels = [_SPACE.sub(" ", label) for label in answer.labels]
    for numbers in answer.scores:
        ranked = sorted(zip(numbers, labels, strict=True), key=lambda pair: -pair[0])
        write_text(["\t".join(f"{label} {number:.4f}" for number, label in ranked)])


def _joined(parts: Sequence[Classifications]) -> Classifications:
    scores = tuple(numbers for part in parts for numbers in part.scores)
    return Classifications(parts[0].model, parts[0].labels, scores, total(part.usage for part in parts))
