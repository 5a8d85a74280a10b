"""`quire reset-prefix-cache` and `quire profile`: calls of operators to the workers of a deployment."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from quire_client.admin import DEFAULT_ADMIN_ADDRESS, AdminClient
from quire_client.cli import options as opt
from quire_client.cli.output import admin_error, print_json, print_table
from quire_client.errors import QuireError

_OfModel = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Only workers of this model.", show_default="all workers"),
]


class ProfileAction(StrEnum):
    START = "start"
    STOP = "stop"


def reset_prefix_cache(
    model: _OfModel = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = 10.0,
    admin: opt.Admin = DEFAULT_ADMIN_ADDRESS,
) -> None:
    """Free the cached KV blocks of workers. Blocks of running, swapped and preempted sequences are kept."""
    try:
        with AdminClient(admin, timeout=timeout) as client:
            workers = client.reset_prefix_cache(model=model)
    except QuireError as error:
        raise admin_error(error, admin) from error
    if output is opt.OutputFormat.JSON:
        print_json(workers)
        return
    rows = [
        (
            one.model,
            one.worker,
            f"{one.num_freed_device_blocks:,}",
            f"{one.num_freed_host_blocks:,}",
            f"{one.num_kept_device_blocks + one.num_kept_host_blocks:,}",
        )
        for one in workers
    ]
    _print_table(("model", "worker", "freed on device", "freed on host", "in use"), rows)


def profile(
    action: Annotated[
        ProfileAction, typer.Argument(metavar="ACTION", help="Start a profile, or end it and write its trace.")
    ],
    model: _OfModel = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = 90.0,
    admin: opt.Admin = DEFAULT_ADMIN_ADDRESS,
) -> int:
    """Profile the steps of workers with torch.profiler. Traces are written to each worker's QUIRE_PROFILE_DIR.

    Exits with 1 if a worker refuses, as one does whose QUIRE_PROFILE_DIR is not set.
    """
    try:
        with AdminClient(admin, timeout=timeout) as client:
            call = client.start_profile if action is ProfileAction.START else client.stop_profile
            workers = call(model=model)
    except QuireError as error:
        raise admin_error(error, admin) from error
    if output is opt.OutputFormat.JSON:
        print_json(workers)
    else:
        done = "started" if action is ProfileAction.START else "stopped"
        rows = [(one.model, one.worker, one.problem or one.path or done) for one in workers]
        _print_table(("model", "worker", "profile"), rows)
    return int(any(one.problem for one in workers))


def _print_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table)
