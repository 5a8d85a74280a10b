"""An event loop whose clock a test can advance."""

import asyncio


class ShiftedLoop(asyncio.SelectorEventLoop):
    """Timers use the machine's clock plus `shift` seconds, so no test waits for them."""

    shift = 0.0

    def time(self) -> float:
        """The clock, in seconds."""
        return super().time() + self.shift
