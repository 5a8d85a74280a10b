"""How full the blocks in use are, by the scheduler's own counters, summed over all steps."""

from dataclasses import dataclass
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import BenchmarkFailed

_TOKENS, _SLOTS = "quire_kv_tokens_used_total", "quire_kv_slots_used_total"


@dataclass(frozen=True)
class KvUse:
    """Tokens stored, and slots of the blocks they are in, summed over all steps so far."""

    tokens: float
    slots: float

    @classmethod
    def read(cls, url: str) -> Self:
        """From a scheduler's Prometheus page. Raises BenchmarkFailed where it does not tell."""
        text = httpx.get(url, trust_env=False).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        totals = {name: sum(s.value for s in samples if s.name == name) for name in (_TOKENS, _SLOTS)}
        if missing := totals.keys() - {sample.name for sample in samples}:
            raise BenchmarkFailed(f"the scheduler does not export {', '.join(sorted(missing))}")
        return cls(totals[_TOKENS], totals[_SLOTS])

    def wasted_since(self, before: "KvUse") -> float:
        """The share of slots in used blocks that held no token, over the steps since then."""
        slots = self.slots - before.slots
        if slots <= 0:
            raise BenchmarkFailed("the scheduler counted no KV slots in use")
        return 1 - (self.tokens - before.tokens) / slots
