"""Streams of random prompts that want more KV blocks than there are, and how fast they are served."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from quire_client import AsyncClient

_PROMPT, _OUTPUT = (16, 400), (100, 700)
_NUM_REPEATED = 4  # prompts that are sent again and again, whose tokens are known from before the limit
_LONGER_SECONDS = 120.0  # that a slow machine may take until it has shown what is to be shown


@dataclass(frozen=True)
class Pace:
    """How fast a load was served. The tokens are those that came until the first stream ended, as all streams ran
    until then; the waits, in seconds, are those for the first token of each request.
    """

    seconds: float
    tokens: int
    tokens_per_second: float
    streams_ended: int
    median_wait: float
    longest_wait: float


@dataclass(frozen=True)
class Call:
    """A request, and how many tokens it gets."""

    prompt: list[int]
    max_tokens: int

    async def send(self, client: AsyncClient, on_tokens: Callable[[int], None] = lambda _: None) -> list[int]:
        tokens: list[int] = []
        async for chunk in client.stream(self.prompt, max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0):
            tokens += chunk.token_ids
            on_tokens(len(chunk.token_ids))
        return tokens


class Load:
    """Streams of random prompts, some of which repeat earlier ones.

    Prompts and outputs have the same lengths in each load. The tokens of the prompts depend on `seed`, so that no load
    finds the prefixes of another one cached. What is wrong is appended to `errors`.
    """

    def __init__(self, client: AsyncClient, vocab_size: int, errors: list[str], seed: int = 1) -> None:
        self._client, self._errors = client, errors
        self._lengths, self._rng = random.Random(1), random.Random(seed)
        self._vocab_size = vocab_size
        self._repeated = [self._new_call() for _ in range(_NUM_REPEATED)]
        self._known: list[list[int]] = []
        self._arrivals: list[tuple[float, int]] = []
        self._waits: list[float] = []
        self._num_ended = 0

    async def learn(self) -> None:
        """Sends the prompts that are repeated, while nothing is short. Later ones must have the same tokens."""
        self._known = await asyncio.gather(*(call.send(self._client) for call in self._repeated))

    async def run(self, num_streams: int, seconds: float, is_shown: Callable[[], bool] = lambda: True) -> Pace:
        """So many streams at a time for so long, and for a while longer until `is_shown`. Those that run at the end are
        awaited.
        """
        self._arrivals, self._waits, self._num_ended = [], [], 0
        began = time.monotonic()
        latest = began + seconds + min(10 * seconds, _LONGER_SECONDS)

        def goes_on() -> bool:
            now = time.monotonic()
            return now < began + seconds or (now < latest and not is_shown())

        ended = min(await asyncio.gather(*(self._stream(goes_on) for _ in range(num_streams))))
        tokens = sum(number for at, number in self._arrivals if at <= ended)
        return Pace(
            seconds=round(ended - began, 1),
            tokens=tokens,
            tokens_per_second=round(tokens / (ended - began), 1),
            streams_ended=self._num_ended,
            median_wait=round(median(self._waits or [0.0]), 3),
            longest_wait=round(max(self._waits, default=0.0), 3),
        )

    async def _stream(self, goes_on: Callable[[], bool]) -> float:
        """Returns when it ended."""
        while goes_on():
            place = self._lengths.randrange(8 * _NUM_REPEATED)
            call = self._repeated[place] if place < _NUM_REPEATED else self._new_call()
            try:
                tokens = await self._send(call)
            except Exception as error:
                self._errors.append(f"a stream failed: {type(error).__name__}: {error}")
                break
            if len(tokens) != call.max_tokens:
                self._errors.append(f"a stream has {len(tokens)} of {call.max_tokens} tokens")
            if place < len(self._known) and tokens != self._known[place]:
                self._errors.append(f"repeated prompt {place} has other tokens than before")
            self._num_ended += 1
        return time.monotonic()

    async def _send(self, call: Call) -> list[int]:
        sent, waits = time.monotonic(), self._waits

        def note(number: int) -> None:
            now = time.monotonic()
            if number and not came:
                waits.append(now - sent)
            came.append(number)
            self._arrivals.append((now, number))

        came: list[int] = []
        return await call.send(self._client, note)

    def _new_call(self) -> Call:
        length = self._lengths.randint(*_PROMPT)
        return Call([self._rng.randrange(self._vocab_size) for _ in range(length)], self._lengths.randint(*_OUTPUT))
