"""Other tasks of the event loop run between the prompts of a call."""

import asyncio

from gateway_svc.work_costs import LONG, PROMPT, PROMPT_TOKEN

_MOST_AT_ONCE = 4 * LONG


class LoopYield:
    """Divides work on the prompts of a call, of which there may be thousands."""

    def __init__(self) -> None:
        self._cost = 0.0

    async def before_prompt(self, num_tokens: int) -> None:
        """Lets other tasks run if there was much work since they did. The next prompt has so many tokens."""
        if self._cost > _MOST_AT_ONCE:
            await asyncio.sleep(0)
            self._cost = 0.0
        self._cost += PROMPT + PROMPT_TOKEN * num_tokens
