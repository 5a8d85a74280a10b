"""The `quire` command line."""

import io
import sys


def main() -> None:
    """Runs `quire` and leaves with its exit code: 0 done, 1 failed, 2 misused, 130 interrupted."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print("quire: the command line needs more than the client: pip install 'quire[client]'", file=sys.stderr)
        sys.exit(1)
    from quire_client.cli.app import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an older terminal still shows what it can
    sys.exit(run())
