"""The counters of a scheduler's core."""

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counters since the start, for metrics."""

    preemptions: int = 0
    swaps: int = 0  # preemptions by swap
    keeps: int = 0  # preemptions that left the KV on the device
    pauses: int = 0  # sequences that gave up their slot because their account's tokens were used up
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0  # by steps, recomputed ones included
    cache_queries: int = 0  # tokens looked up in the prefix index
    cache_hits: int = 0  # of these, found on either tier
    host_hits: int = 0  # of these, copied from the host
    kv_slots: int = 0  # slots for a token in blocks in use, summed over steps
    unfilled_kv_slots: int = 0  # of these, without a token
