"""How full the blocks in use are, by the scheduler's own counters, summed over all steps."""

from dataclasses import dataclass
from typing import Self

from benchmarks.deployment import scrape
from benchmarks.processes import BenchmarkFailed


@dataclass(frozen=True)
class KvUse:
    """Tokens stored, and slots of the blocks they are in, summed over all steps so far."""

    tokens: float
    slots: float

    @classmethod
    def read(cls, address: str) -> Self:
        """From a scheduler's Prometheus page. Raises BenchmarkFailed where it does not tell."""
        samples = scrape(address)
        return cls(samples["quire_kv_tokens_used_total", ""], samples["quire_kv_slots_used_total", ""])

    def wasted_since(self, before: "KvUse") -> float:
        """The share of slots in used blocks that held no token, over the steps since then."""
        slots = self.slots - before.slots
        if slots <= 0:
            raise BenchmarkFailed("the scheduler counted no KV slots in use")
        return 1 - (self.tokens - before.tokens) / slots
