"""Tokens for arrivals, the same for the same seed: prompts, and sampled tokens."""

import random
from dataclasses import dataclass

from benchmarks.simulator.arrivals import Arrival, Prefix
from scheduler_svc.core.step import FailureCause

# The simulator does not interpret tokens, so ids need only differ where prompts do.
_POOL_SIZE = 1 << 16
_NUM_DRAWN = 1 << 12
_FIRST_ID = 2
STOP_TOKEN = 1
"""Ends an output that is shorter than `max_tokens`; used nowhere else."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[()] = ()
    failure: str | None = None
    failure_cause: FailureCause = FailureCause.INTERNAL


NOTHING = Token(())


@dataclass(frozen=True, slots=True)
class Script:
    """A request's output, which is known from the start.

    `stops_at` is the number of tokens, prompt included, before its stop token; None where it ends by its length.
    """

    offset: int
    stops_at: int | None


class Tokens:
    """Makes prompts and outputs. Ids come from one pool of objects, so that 100,000 prompts take little memory."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{seed} pool")
        self._pool = rng.choices(range(_FIRST_ID, 1 << 31), k=_POOL_SIZE)
        self._drawn = [Token((token_id,)) for token_id in self._pool[:_NUM_DRAWN]]
        self._stop = Token((STOP_TOKEN,))
        self._prefixes: dict[str, list[int]] = {}
        self._rng = random.Random(f"{seed} prompts")

    def prompt(self, arrival: Arrival, number: int) -> list[int]:
        """A request's prompt. Behind its prefix comes its number, so it is unique."""
        if arrival.prompt is not None:
            return list(arrival.prompt)
        shared = self._prefix(arrival.prefix) if arrival.prefix is not None else []
        num_own = arrival.prompt_tokens - len(shared)
        return shared + [(1 << 31) + number, *self._piece(num_own)][:num_own]

    def script(self, arrival: Arrival, num_prompt: int) -> Script:
        """A request's output after its prompt."""
        stops_at = num_prompt + arrival.output_tokens - 1 if arrival.output_tokens < arrival.max_tokens else None
        return Script(self._rng.randrange(_NUM_DRAWN), stops_at)

    def draw(self, script: Script, num_tokens: int) -> Token:
        """The token after the first `num_tokens`, prompt included."""
        if num_tokens == script.stops_at:
            return self._stop
        return self._drawn[(script.offset + num_tokens) % _NUM_DRAWN]

    def _prefix(self, prefix: Prefix) -> list[int]:
        tokens = self._prefixes.setdefault(prefix.name, [])
        while len(tokens) < prefix.num_tokens:
            tokens += self._piece(prefix.num_tokens - len(tokens))
        return tokens[: prefix.num_tokens]

    def _piece(self, num_tokens: int) -> list[int]:
        start = self._rng.randrange(_POOL_SIZE)
        piece = self._pool[start : start + num_tokens]
        while len(piece) < num_tokens:
            piece += self._pool[: num_tokens - len(piece)]
        return piece
