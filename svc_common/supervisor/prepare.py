"""Prepares the model's files before roles start: `python -m worker_svc.prepare`, which shows its own progress."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from svc_common.supervisor.launch import launch_command

PREPARE_COMMAND = (sys.executable, "-m", "worker_svc.prepare")


class PrepareFailed(Exception):  # noqa: N818
    """The command failed; its own output says why."""


async def prepare_model(environment: Mapping[str, str], command: Sequence[str] = PREPARE_COMMAND) -> None:
    """Runs the command to its end. Raises PrepareFailed; kills it when cancelled."""
    process = await asyncio.create_subprocess_exec(
        *launch_command(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,  # the model's path; progress is on stderr
        env=os.environ | dict(environment),
        process_group=0,
    )
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if status != 0:
        raise PrepareFailed(f"the model could not be prepared (exit status {status})")
