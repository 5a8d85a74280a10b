"""Prometheus metrics of the worker."""

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from worker_svc.device_thread import Timed
from worker_svc.host_memory import HostMemory
from worker_svc.step import StepOutcome

if TYPE_CHECKING:
    from worker_svc.memory_parts import MemoryParts

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)

_steps = Counter("quire_worker_steps_total", "Steps run")
_failed_steps = Counter("quire_worker_failed_steps_total", "Steps that failed as a whole")
_failed_sequences = Counter("quire_worker_failed_sequences_total", "Sequences that failed in a step")
_step_seconds = Histogram("quire_worker_step_seconds", "Time of a step on the device thread", buckets=_STEP_SECONDS)
_busy_seconds = Counter(
    "quire_worker_busy_seconds_total",
    "Time of steps on the device, without waiting for the step before",
)
_idle_seconds = Counter("quire_worker_idle_seconds_total", "Time without a step on the device")
_tokens = Counter("quire_worker_tokens_total", "Tokens computed", ["kind"])
_prefill_tokens = _tokens.labels(kind="prefill")
_decode_tokens = _tokens.labels(kind="decode")
_draft_tokens = _tokens.labels(kind="draft")
_accepted_tokens = Counter("quire_worker_accepted_draft_tokens_total", "Draft tokens that were accepted")
_swapped_blocks = Counter("quire_worker_swapped_blocks_total", "Blocks swapped", ["direction"])
_swap_seconds = Counter("quire_worker_swap_seconds_total", "Time in which blocks were swapped", ["direction"])
_failed_swaps = Counter("quire_worker_failed_swaps_total", "Swaps that failed", ["direction"])
_compiled_grammars = Counter("quire_worker_compiled_grammars_total", "Grammars compiled")
_cached_grammars = Gauge("quire_worker_cached_grammars", "Compiled grammars that are kept")
_masks = Counter("quire_worker_token_masks_total", "Token masks made; equal rows share one")
_mask_seconds = Counter(
    "quire_worker_token_mask_seconds_total", "Time in which token masks were made, beside the forward pass"
)
_host_memory = Gauge(
    "quire_worker_host_memory_bytes",
    "Memory of the container, or of the machine: used, without page cache that can be dropped, and the limit",
    ["state"],
)
_device_memory = Gauge("quire_worker_device_memory_bytes", "Memory of the GPU: used by all, and in all", ["state"])
_memory_parts = Gauge(
    "quire_worker_memory_bytes",
    "Memory by what it holds: weights, kv, swap, activations; fragmentation is unused memory of allocators",
    ["part"],
)
_memory_pressure = Gauge("quire_worker_memory_pressure", "How short memory is: 0 not, 1 high, 2 critical")
_out_of_memory = Counter("quire_worker_out_of_memory_total", "Sequences that failed because a step ran out of memory")


def set_memory(host: HostMemory, pressure: int) -> None:
    _host_memory.labels("used").set(host.used)
    _host_memory.labels("limit").set(host.limit)
    _memory_pressure.set(pressure)


def set_memory_parts(parts: "MemoryParts") -> None:
    for part in ("weights", "kv", "swap", "activations", "fragmentation"):
        _memory_parts.labels(part).set(getattr(parts, part))
    if parts.device_limit:
        _device_memory.labels("used").set(parts.device_used)
        _device_memory.labels("limit").set(parts.device_limit)


def count_step(outcome: Timed[StepOutcome]) -> None:
    _steps.inc()
    _step_seconds.observe(outcome.busy_seconds)
    _busy_seconds.inc(outcome.busy_seconds)
    _idle_seconds.inc(outcome.idle_seconds)
    _prefill_tokens.inc(outcome.value.prefill_tokens)
    _decode_tokens.inc(outcome.value.decode_tokens)
    _draft_tokens.inc(outcome.value.draft_tokens)
    _accepted_tokens.inc(outcome.value.accepted_tokens)
    _failed_sequences.inc(sum(result.failure is not None for result in outcome.value.sequences))
    _out_of_memory.inc(outcome.value.num_left_out)
    for swap_result in outcome.value.swap_results:
        direction = swap_result.direction.value
        if swap_result.failure is None:
            _swapped_blocks.labels(direction).inc(swap_result.num_blocks)
            _swap_seconds.labels(direction).inc(swap_result.seconds)
        else:
            _failed_swaps.labels(direction).inc()


def count_failed_step() -> None:
    _failed_steps.inc()


def count_grammar_compiled() -> None:
    _compiled_grammars.inc()


def set_cached_grammars(count: int) -> None:
    _cached_grammars.set(count)


def count_masks(num_masks: int, seconds: float) -> None:
    _masks.inc(num_masks)
    _mask_seconds.inc(seconds)
