"""The `quire` command line."""

import io
import sys

from quire_client.cli import packages


def main() -> None:
    """Runs `quire` and leaves with its exit code: 0 success, 1 failure, 2 invalid arguments, 130 interrupt."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print(packages.MISSING, file=sys.stderr)
        sys.exit(1)
    from quire_client.cli.app import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows replacements
    sys.exit(run())
