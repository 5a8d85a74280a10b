"""Prometheus metrics that are read from the engine when they are scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.engine import Engine
from scheduler_svc.records import Records


class EngineCollector(Collector):
    """What the engine and its core count."""

    def __init__(self, engine: Engine, records: Records) -> None:
        self._engine = engine
        self._records = records

    def collect(self) -> Iterable[Metric]:
        core, totals = self._engine.core, self._engine.core.totals
        blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks of KV memory", labels=["tier", "state"])
        counts = [replica.pool.counts for replica in list(core.replicas)]
        for state in ("free", "cached", "used", "in_flight"):
            blocks.add_metric(["device", state], sum(getattr(count, state) for count in counts))
        yield blocks
        yield GaugeMetricFamily("quire_requests_running", "Sequences that run", core.num_running)
        yield GaugeMetricFamily("quire_requests_waiting", "Sequences that wait for a worker", core.num_queued)
        yield GaugeMetricFamily("quire_workers_ready", "Workers that take steps", len(core.replicas))
        yield GaugeMetricFamily("quire_store_degraded", "1 while Redis cannot be reached", self._records.degraded)
        for name, text, value in (
            ("quire_preemptions", "Sequences that gave up their blocks", totals.preemptions),
            ("quire_prompt_tokens", "Tokens of prompts taken in", totals.prompt_tokens),
            ("quire_generation_tokens", "Tokens generated", totals.generation_tokens),
            ("quire_prefix_cache_queries", "Tokens looked up in the prefix cache", totals.cache_queries),
            ("quire_prefix_cache_hits", "Tokens found in the prefix cache", totals.cache_hits),
            ("quire_kv_slots_used", "Token places in blocks in use, summed over steps", totals.slots),
            (
                "quire_kv_tokens_used",
                "Tokens in blocks in use, summed over steps",
                totals.slots - totals.slots_unfilled,
            ),
        ):
            yield CounterMetricFamily(name, text, value)
