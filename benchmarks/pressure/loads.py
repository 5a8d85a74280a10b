"""Loads while KV memory is short: regimes in which swapping and recomputing cost differently."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from quire_client.bench.mix import MixRequest

BLOCK_SIZE = 16
KV_SHARE = 0.25  # of the blocks that a load would take if all of it ran at once

_ORDINARY_IDS = range(2_000, 20_000)  # in all common vocabularies


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(_ORDINARY_IDS, k=count))


@dataclass(frozen=True)
class Regime:
    """Requests that are all in flight at once. Lengths are uniform between bounds, both included.

    A prompt is one of `num_prefixes` prefixes, taken in turns, and tokens of its own. `swap_rate` limits
    copies, in bytes per second; None does not.
    """

    name: str
    title: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_prefixes: int = 0
    prefix_tokens: int = 0
    swap_rate: float | None = None

    def requests(self, repetition: int) -> tuple[MixRequest, ...]:
        """The same number and lengths in each repetition, of other tokens, so that no cache holds any of them."""
        lengths = random.Random(f"{self.name} lengths")
        tokens = random.Random(f"{self.name} {repetition}")
        prefixes = [random_tokens(tokens, self.prefix_tokens) for _ in range(self.num_prefixes)]
        requests = []
        for i in range(self.num_requests):
            prefix = prefixes[i % self.num_prefixes] if prefixes else ()
            own = random_tokens(tokens, lengths.randint(*self.prompt_tokens))
            requests.append(MixRequest((*prefix, *own), lengths.randint(*self.output_tokens)))
        return tuple(requests)

    @property
    def num_blocks_at_once(self) -> int:
        """Blocks of all requests together at their ends, shared prefixes counted once."""
        shared = self.prefix_tokens // BLOCK_SIZE
        ends = (len(request.prompt_token_ids) + request.output_tokens for request in self.requests(0))
        return self.num_prefixes * shared + sum(math.ceil(end / BLOCK_SIZE) - shared for end in ends)

    @property
    def num_blocks(self) -> int:
        return math.ceil(KV_SHARE * self.num_blocks_at_once)

    def quick(self) -> "Regime":
        """A smaller regime, for a quick pass."""
        return replace(self, num_requests=self.num_requests // 3)

    def describe(self) -> dict[str, Any]:
        """The regime as a result holds it."""
        requests = self.requests(0)
        return {
            "title": self.title,
            "num_requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "num_blocks": self.num_blocks,
            "num_blocks_at_once": self.num_blocks_at_once,
            "swap_rate": self.swap_rate,
        }


# At these lengths many sequences are preempted in a few seconds. The smallest model's block
# takes several times longer to copy at the rate of the first than its tokens take to compute.
REGIMES = (
    Regime("short", "short prompts, slow copies", 48, (24, 56), (64, 128), swap_rate=30e6),
    Regime("long", "long prompts", 20, (256, 384), (128, 192)),
    Regime("shared", "shared prefixes", 40, (16, 48), (64, 128), num_prefixes=2, prefix_tokens=256),
)
