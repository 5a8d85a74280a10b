"""Commands of `quire` as processes."""

import asyncio
import sys

from deployment import Deployment


async def quire_command(running: Deployment, command: str, *arguments: str, given: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command at a deployment, with `given` on its standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_client", command, "--address", running.grpc, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(given.encode()), 120)
    return process.returncode, out.decode(), err.decode()
