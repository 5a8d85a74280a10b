"""Prometheus metrics that are read from the engine when they are scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.replica import Replica
from scheduler_svc.engine import SchedulerEngine


class EngineCollector(Collector):
    """What the engine and its core count."""

    def __init__(self, engine: SchedulerEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        core, totals = self._engine.core, self._engine.core.totals
        blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks of KV memory", labels=["tier", "state"])
        replicas = list(core.replicas)
        for tier, pools in (("device", [r.device.pool for r in replicas]), ("host", [r.host.pool for r in replicas])):
            counts = [pool.counts for pool in pools]
            for state in ("free", "cached", "used", "in_flight"):
                blocks.add_metric([tier, state], sum(getattr(count, state) for count in counts))
        yield blocks
        yield GaugeMetricFamily("quire_requests_running", "Sequences that run", core.num_running)
        yield GaugeMetricFamily("quire_requests_waiting", "Sequences that wait for a worker", core.num_queued)
        yield GaugeMetricFamily(
            "quire_requests_swapped", "Those of them whose blocks stand in host memory", core.num_swapped
        )
        waiting = core.waiting.admission
        yield GaugeMetricFamily("quire_queue_tokens", "Tokens that those who wait may come to have", waiting.num_tokens)
        yield from self._costs(replicas)
        preemptions = CounterMetricFamily(
            "quire_preemptions", "Sequences that gave up their blocks, by how they come back", labels=["choice"]
        )
        preemptions.add_metric(["swap"], totals.swaps)
        preemptions.add_metric(["recompute"], totals.preemptions - totals.swaps)
        yield preemptions
        hits = CounterMetricFamily("quire_prefix_cache_hits", "Tokens found in the prefix cache", labels=["tier"])
        hits.add_metric(["device"], totals.cache_hits - totals.host_hits)
        hits.add_metric(["host"], totals.host_hits)
        yield hits
        yield GaugeMetricFamily("quire_workers_ready", "Workers that take steps", len(core.replicas))
        yield GaugeMetricFamily("quire_epoch", "The term of the scheduler that leads", self._engine.epoch)
        journal = self._engine.journal
        degraded = "1 while the store cannot be reached, or is far behind"
        yield GaugeMetricFamily("quire_store_degraded", degraded, journal.is_degraded)
        yield GaugeMetricFamily("quire_journal_lag_seconds", "How far the store is behind the steps", journal.lag)
        for name, text, value in (
            ("quire_prompt_tokens", "Tokens of prompts taken in", totals.prompt_tokens),
            ("quire_generation_tokens", "Tokens generated", totals.generation_tokens),
            ("quire_prefix_cache_queries", "Tokens looked up in the prefix cache", totals.cache_queries),
            (
                "quire_tokens_computed",
                "Tokens that steps computed, those of preempted sequences again",
                totals.computed_tokens,
            ),
            ("quire_kv_slots_used", "Token places in blocks in use, summed over steps", totals.slots),
            (
                "quire_kv_tokens_used",
                "Tokens in blocks in use, summed over steps",
                totals.slots - totals.slots_unfilled,
            ),
        ):
            yield CounterMetricFamily(name, text, value)

    def _costs(self, replicas: list[Replica]) -> Iterable[Metric]:
        """What bringing a preempted sequence back is taken to cost, by worker: the figures that it is decided by."""
        estimates = GaugeMetricFamily(
            "quire_cost_seconds", "Estimated seconds, for a block's worth of tokens", labels=["worker", "what"]
        )
        for replica in replicas:
            swap, recompute = (
                replica.costs.swap_seconds(1, 1),
                replica.costs.recompute_seconds(replica.shape.block_size),
            )
            if replica.shape.num_host_blocks:
                estimates.add_metric([replica.name, "swap"], swap)
            estimates.add_metric([replica.name, "recompute"], recompute)
        yield estimates
