"""`quire serve`: starts the services, where they are installed beside the client."""

import os

import typer

from quire_client.cli.services import SERVE, service_command


def serve(context: typer.Context) -> None:
    """Start everything on this machine, with the flags of `vllm serve`."""
    command = service_command(SERVE, *context.args)
    os.execv(command[0], command)
