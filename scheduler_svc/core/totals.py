"""The counters of a scheduler's core."""

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counters since the start, for metrics."""

    preemptions: int = 0
    swaps: int = 0  # preemptions by swap
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0  # by steps, recomputed ones included
    cache_queries: int = 0  # tokens looked up in the prefix index
    cache_hits: int = 0  # of these, found on either tier
    host_hits: int = 0  # of these, copied from the host
    slots: int = 0  # token slots in blocks in use, summed over steps
    slots_unfilled: int = 0  # of these, without a token
