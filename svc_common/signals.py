"""The signals that end a process in order."""

import signal


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP, which the end of a terminal sends: unless it is ignored, as `nohup` has it."""
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if ends_with_terminal else [])]
