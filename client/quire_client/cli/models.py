"""`quire models`: the models of a server."""

from rich.table import Table

from quire_client.cli import options as opt
from quire_client.cli.interruptible import collected
from quire_client.cli.output import print_json, print_table
from quire_client.sync import Client


def models(
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """List the served models."""
    with Client(address, api_key=api_key, timeout=timeout) as client:
        served = collected(client.models, client)
    if output is opt.OutputFormat.JSON:
        print_json(served)
        return
    table = Table(box=None)
    table.add_column("model", no_wrap=True)
    table.add_column("context", justify="right")
    table.add_column("vocabulary", justify="right")
    table.add_column("aliases")
    for model in served:
        table.add_row(model.name, f"{model.context_length:,}", f"{model.vocab_size:,}", ", ".join(model.aliases))
    print_table(table)
