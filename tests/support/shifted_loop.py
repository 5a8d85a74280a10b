"""An event loop whose clock a test may set forward."""

import asyncio


class ShiftedLoop(asyncio.SelectorEventLoop):
    """Timers are due by the machine's clock and `shift`, in seconds, so that no test waits for them."""

    shift = 0.0

    def time(self) -> float:
        """The clock, in seconds."""
        return super().time() + self.shift
