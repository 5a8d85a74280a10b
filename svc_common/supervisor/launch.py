"""Starts a program that ends with its supervisor, even where the supervisor is killed.

`launch_command` gives the command line. It runs this file, which becomes the program: a step in a process of its own,
because code between fork and exec of a process with threads, as grpc has, may deadlock.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_NORMAL, _BATCH = "normal", "batch"


def launch_command(command: Sequence[str], *, is_batch: bool = False) -> tuple[str, ...]:
    """The command line that runs `command` for as long as this process lives.

    With `is_batch`, a program that wakes up waits until a running one pauses or has used its time slice, instead of
    interrupting it. For services on the machine of a worker, whose compute threads all wait for each one that is
    interrupted.
    """
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), _BATCH if is_batch else _NORMAL, *command)


def main() -> None:
    """Becomes the program that the arguments name, after the supervisor's process id and the scheduling policy."""
    supervisor, sched_policy, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        raise SystemExit(1)  # the supervisor died before prctl could take effect
    if sched_policy == _BATCH and sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted: the normal policy stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
