"""The texts of a command that gets a value of each: arguments, or lines, in calls of a bounded size."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from quire_client.cli import options as opt
from quire_client.cli.input import read_lines
from quire_client.cli.output import TEXT_TOO_LONG, print_json
from quire_client.errors import QuireError
from quire_client.results import Usage

T = TypeVar("T")

Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="Texts.", show_default="lines of standard input")
]
TruncateTexts = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Keep the first N tokens of each text; -1: as many as fit.",
        show_default="a text that is too long is refused",
    ),
]

_INPUTS_PER_CALL = 256
_CHARACTERS_PER_CALL = 2**19  # a message has at most 4 MiB, where a gateway allows no more
_INPUT = re.compile(r"inputs\[(\d+)\].*")


def answers(call: Callable[[Sequence[str]], T], texts: Sequence[str] | None, file: Path | None) -> Iterator[T]:
    """The answers of calls with all texts; without any, with the lines of a file, or of standard input.

    Raises BadParameter where there are none, or both, and QuireError with the text at fault as its field.
    """
    if texts and file is not None:
        raise typer.BadParameter("takes the place of TEXT: give one of the two", param_hint="--file")
    source = None if texts else str(file or "standard input")
    num_sent = 0
    for some in _calls(texts or read_lines(file)):
        try:
            answer = call(some)
        except QuireError as error:
            raise _located(error, source, num_sent) from error
        num_sent += len(some)
        yield answer
    if not num_sent:
        raise typer.BadParameter("there is none", param_hint="TEXT")


def write_answers(
    of_calls: Iterable[T],
    output: opt.OutputFormat,
    write: Callable[[T], None],
    join: Callable[[Sequence[T]], T],
) -> None:
    """Writes the answer of each call as it comes, as text; or all of them, joined, as one line of JSON."""
    if output is opt.OutputFormat.JSON:
        print_json(join(list(of_calls)), indent=None)
        return
    for answer in of_calls:
        write(answer)


def total(usages: Iterable[Usage]) -> Usage:
    """The usage of several calls."""
    return reduce(
        lambda one, other: Usage(one.prompt_tokens + other.prompt_tokens, 0, one.cached_tokens + other.cached_tokens),
        usages,
    )


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
    if error.reason == "CONTEXT_LENGTH_EXCEEDED":
        error = replace(error, reason=TEXT_TOO_LONG)
    if error.field is None or (match := _INPUT.fullmatch(error.field)) is None:
        return error
    number = num_before + int(match[1]) + 1
    return replace(error, field=f"{source}, line {number}" if source else f"TEXT {number}")
