"""Starts a program that ends with its supervisor, even where the supervisor is killed.

`launch_command` gives the command line. It runs this file, which becomes the program: a step in a process of its own,
because code between fork and exec of a process with threads, as grpc has, may deadlock.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def launch_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs `command` for as long as this process lives."""
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), *command)


def main() -> None:
    """Becomes the program that the arguments name, after the supervisor's process id."""
    supervisor, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        raise SystemExit(1)  # the supervisor died before prctl could take effect
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
