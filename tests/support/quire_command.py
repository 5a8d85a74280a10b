"""Runs the command `quire`, as a process of its own or in this one."""

import asyncio
import os
import sys
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner, Result

from quire_client.cli.app import app

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A process that ended."""

    code: int | None
    out: str
    err: str


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))
    return {**os.environ, "PYTHONPATH": paths}


async def start(*args: str, stdout: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    """Starts `quire` as a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_client", *args),
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )


async def quire(*args: str, given: str = "") -> Ended:
    """Runs `quire` as a process of its own, with `given` on its standard input."""
    process = await start(*args)
    out, err = await asyncio.wait_for(process.communicate(given.encode()), 120)
    return Ended(process.returncode, out.decode(), err.decode())


async def invoke(*args: str, given: str | None = None) -> Result:
    """Runs a command in this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, args, given)
