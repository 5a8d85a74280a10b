"""Other tasks of the event loop run between the prompts of a call."""

import asyncio

# They take a few milliseconds.
_TOKENS_AT_ONCE = 8 * 2**10
_TOKENS_OF_PROMPT = 64  # that take as long as what a prompt takes beside its tokens


class LoopYield:
    """Divides work on the prompts of a call, of which there may be thousands."""

    def __init__(self) -> None:
        self._num_tokens = 0

    async def before_prompt(self, num_tokens: int) -> None:
        """Lets other tasks run if there was much work since they did. The next prompt has so many tokens."""
        if self._num_tokens > _TOKENS_AT_ONCE:
            await asyncio.sleep(0)
            self._num_tokens = 0
        self._num_tokens += _TOKENS_OF_PROMPT + num_tokens
