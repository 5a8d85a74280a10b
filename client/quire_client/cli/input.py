"""Text from standard input and from files, as lines and as a whole. What is not UTF-8 is refused by name."""

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import typer

_STDIN = "standard input"
_ENCODING = "utf-8-sig"  # editors of Windows begin a file with a mark, which is no part of its text


def read_text() -> str:
    """All of standard input. Raises BadParameter."""
    with _refusing_other_text(_STDIN):
        return _stdin().read()


def read_file(path: Path) -> str:
    """All of a file. Raises BadParameter."""
    with _refusing_other_text(str(path)):
        return path.read_text(encoding=_ENCODING)


def read_lines(path: Path | None = None) -> Iterator[str]:
    """The lines of a file, or of standard input as they come, without their ends. Raises BadParameter."""
    with _refusing_other_text(str(path or _STDIN)), _opened(path) as lines:
        yield from (line.removesuffix("\n") for line in lines)


def _opened(path: Path | None) -> AbstractContextManager[TextIO]:
    return nullcontext(_stdin()) if path is None else path.open(encoding=_ENCODING)


def _stdin() -> TextIO:
    """Standard input as UTF-8, whatever the locale says."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=_ENCODING, errors="strict")
    return sys.stdin


@contextmanager
def _refusing_other_text(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not text in UTF-8") from error
    except OSError as error:
        raise typer.BadParameter(f"{name}: {(error.strerror or str(error)).lower()}") from error
