"""The `quire` command line."""

import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

from quire_client.cli import packages


def main() -> None:
    """Runs `quire` and leaves with its exit code: 0 success, 1 failure, 2 invalid arguments, 130 interrupt."""
    _open_missing_streams()
    try:
        import typer  # noqa: F401

        from quire_client.cli.app import run
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(packages.MISSING, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # the imports take a second
        _leave(130)

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows replacements
    try:
        code = run()
    except SystemExit as exit_request:  # click's, where the reader of a pipe has gone
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    _leave(code)


def _open_missing_streams() -> None:
    """Opens what the caller has closed, as `>&-` does: otherwise the next socket would be standard output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long as the process


def _leave(code: int) -> NoReturn:
    """Ends the process as it is: grpc aborts where one of its threads still polls while the library is taken down."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
