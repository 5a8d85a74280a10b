"""Prometheus metrics that are read from the engine when they are scraped."""

import asyncio
import threading
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.explain import count_unpaid
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.totals import Totals
from scheduler_svc.engine import SchedulerEngine
from svc_common.loop_calls import call_on_loop


class EngineCollector(Collector):
    """The counters of the engine and its cores.

    They change on the event loop only, so a scrape in another thread reads them there. Without an answer it has none.
    """

    def __init__(self, engine: SchedulerEngine) -> None:
        """`engine` belongs to the running event loop."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()

    def collect(self) -> Iterable[Metric]:
        if threading.get_ident() == self._thread_id:
            return list(self._read())
        try:
            return call_on_loop(self._loop, lambda: list(self._read()))
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return []

    def _read(self) -> Iterable[Metric]:
        yield from self._models()
        yield GaugeMetricFamily("quire_epoch", "The term of the scheduler that leads", self._engine.epoch)
        apart = GaugeMetricFamily(
            "quire_workers_set_apart", "1 for a worker that is not used until it is restarted", labels=["worker"]
        )
        for address in self._engine.set_apart:
            apart.add_metric([address], 1)
        yield apart
        journal = self._engine.journal
        degraded = "1 while the store cannot be reached, or lags by more than 2 s"
        yield GaugeMetricFamily("quire_store_degraded", degraded, journal.is_degraded)
        yield GaugeMetricFamily(
            "quire_journal_lag_seconds", "Age of the oldest update that the store does not have", journal.lag
        )

    def _models(self) -> Iterable[Metric]:
        """The counters of the cores, by model name, summed over versions."""
        by_name: dict[str, list[Scheduler]] = {}
        for model in self._engine.models:
            by_name.setdefault(model.name, []).append(model.core)
        blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks of KV memory", labels=["model", "tier", "state"])
        costs = GaugeMetricFamily(
            "quire_cost_seconds",
            "Estimated seconds to swap one block out and in, and to recompute it",
            labels=["model", "worker", "method"],
        )
        preemptions = CounterMetricFamily(
            "quire_preemptions",
            "Preempted sequences",
            labels=["model", "method"],
        )
        hits = CounterMetricFamily(
            "quire_prefix_cache_hits", "Tokens found in the prefix cache", labels=["model", "tier"]
        )
        gauges = [(GaugeMetricFamily(name, text, labels=["model"]), read) for name, text, read in _GAUGES]
        counters = [(CounterMetricFamily(name, text, labels=["model"]), read) for name, text, read in _COUNTERS]
        for name, cores in by_name.items():
            replicas = [replica for core in cores for replica in core.replicas]
            _add_blocks(blocks, name, replicas)
            _add_costs(costs, name, replicas)
            totals = [self._engine.models.discarded_totals(name), *(core.totals for core in cores)]
            swaps, hosts = sum(one.swaps for one in totals), sum(one.host_hits for one in totals)
            preemptions.add_metric([name, "swap"], swaps)
            keeps = sum(one.keeps for one in totals)
            preemptions.add_metric([name, "keep"], keeps)
            preemptions.add_metric([name, "recompute"], sum(one.preemptions for one in totals) - swaps - keeps)
            hits.add_metric([name, "device"], sum(one.cache_hits for one in totals) - hosts)
            hits.add_metric([name, "host"], hosts)
            for gauge, read_core in gauges:
                gauge.add_metric([name], sum(map(read_core, cores)))
            for counter, read_totals in counters:
                counter.add_metric([name], sum(map(read_totals, totals)))
        yield from (blocks, costs, preemptions, hits)
        yield from (gauge for gauge, _ in gauges)
        yield from (counter for counter, _ in counters)


_GAUGES: list[tuple[str, str, Callable[[Scheduler], int]]] = [
    ("quire_sequences_running", "Sequences that run", lambda core: core.num_running),
    (
        "quire_sequences_waiting",
        "Sequences that wait for a worker, preempted ones included",
        lambda core: core.num_queued,
    ),
    ("quire_sequences_swapped", "Sequences that wait with their blocks in host memory", lambda core: core.num_on_host),
    (
        "quire_sequences_waiting_for_tokens",
        "Sequences that wait for the token budget of their key, which is used up",
        count_unpaid,
    ),
    (
        "quire_queue_tokens",
        "The most tokens that those who wait may come to have",
        lambda core: core.waiting.admission.num_tokens,
    ),
    ("quire_workers_ready", "Workers that take steps", lambda core: len(core.replicas)),
]
_COUNTERS: list[tuple[str, str, Callable[[Totals], int]]] = [
    ("quire_prompt_tokens", "Tokens of prompts taken in", lambda totals: totals.prompt_tokens),
    ("quire_generation_tokens", "Tokens generated", lambda totals: totals.generation_tokens),
    (
        "quire_pauses",
        "Sequences that gave up their slot because the token budget of their key was used up",
        lambda totals: totals.pauses,
    ),
    ("quire_prefix_cache_queries", "Tokens looked up in the prefix cache", lambda totals: totals.cache_queries),
    (
        "quire_tokens_computed",
        "Tokens that steps computed, those of preempted sequences again",
        lambda totals: totals.computed_tokens,
    ),
    ("quire_kv_slots_used", "Slots for a token in blocks in use, summed over steps", lambda totals: totals.kv_slots),
    (
        "quire_kv_tokens_used",
        "Tokens in blocks in use, summed over steps",
        lambda totals: totals.kv_slots - totals.unfilled_kv_slots,
    ),
]


def _add_blocks(blocks: GaugeMetricFamily, model: str, replicas: list[Replica]) -> None:
    tiers = {"device": [r.kv.device for r in replicas], "host": [r.kv.host for r in replicas]}
    for tier, of_replicas in tiers.items():
        counts = [each.counts for each in of_replicas]
        for state in ("free", "cached", "used", "copying"):
            blocks.add_metric([model, tier, state], sum(getattr(count, state) for count in counts))


def _add_costs(costs: GaugeMetricFamily, model: str, replicas: list[Replica]) -> None:
    """The learned costs that decide between swap and recompute."""
    for replica in replicas:
        if replica.shape.num_host_blocks:
            costs.add_metric([model, replica.name, "swap"], replica.costs.swap_seconds(1, 1))
        costs.add_metric([model, replica.name, "recompute"], replica.costs.recompute_seconds(replica.shape.block_size))
