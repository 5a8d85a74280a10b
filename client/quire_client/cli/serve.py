"""`quire serve`: starts the services, where they are installed beside the client."""

import importlib.util
import os
import sys

import typer


def serve(context: typer.Context) -> None:
    """Start everything on this machine, with the flags of `vllm serve`."""
    if importlib.util.find_spec("svc_common") is None:
        print("quire: the services are not installed here: pip install 'quire[local]'", file=sys.stderr)
        raise typer.Exit(1)
    # Another program: the client does not import the services.
    os.execv(sys.executable, [sys.executable, "-m", "svc_common.supervisor.serve", *context.args])
