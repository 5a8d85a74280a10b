"""Text from standard input and from files, as lines and as a whole. What is not UTF-8 is refused by name."""

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import typer

_STDIN = "standard input"


def read_text() -> str:
    """All of standard input. Raises BadParameter."""
    with _refusing_other_text(_STDIN):
        return _stdin().read()


def read_lines(path: Path | None = None) -> Iterator[str]:
    """The lines of a file, or of standard input as they come, without their ends. Raises BadParameter."""
    with _refusing_other_text(str(path or _STDIN)), _opened(path) as lines:
        yield from (line.removesuffix("\n") for line in lines)


def _opened(path: Path | None) -> AbstractContextManager[TextIO]:
    return nullcontext(_stdin()) if path is None else path.open(encoding="utf-8")


def _stdin() -> TextIO:
    """Standard input as UTF-8, whatever the locale says."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


@contextmanager
def _refusing_other_text(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not text in UTF-8") from error
    except OSError as error:
        raise typer.BadParameter(f"{name}: {(error.strerror or str(error)).lower()}") from error
