"""Starts a role's program so that it dies with its supervisor, even with one that is killed, and minds its neighbours.

`launch_command` gives the command line. It runs this file, which becomes the program: a step in a process of its own,
because what runs between fork and exec of a process with threads, as grpc has, may deadlock.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum

_PR_SET_PDEATHSIG = 1


class SchedPolicy(StrEnum):
    """How a process that wakes up gets a processor where all are busy."""

    NORMAL = "normal"
    """It may interrupt others at once."""
    BATCH = "batch"
    """It waits until one of them pauses, or has had its turn of a few milliseconds. For those beside a worker whose
    threads compute on every processor, and of which each that is interrupted keeps all others waiting."""


def launch_command(command: Sequence[str], sched_policy: SchedPolicy = SchedPolicy.NORMAL) -> tuple[str, ...]:
    """The command line that runs `command` for as long as this process lives."""
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), sched_policy, *command)


def main() -> None:
    """Becomes the program that the arguments name, after the supervisor's process id and the program's sched_policy."""
    supervisor, sched_policy, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        raise SystemExit(1)  # the supervisor died before the line above could notice
    if sched_policy == SchedPolicy.BATCH and sys.platform == "linux":
        with contextlib.suppress(OSError):  # where it is not allowed to, it is prompt
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
