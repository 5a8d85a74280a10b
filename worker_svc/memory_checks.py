"""The check of `quire doctor` for the memory that a model and its cache need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from svc_common.doctor.findings import CheckContext, Finding, ok, skipped, warning, wrong
from svc_common.models import ModelNotFound
from worker_svc.cache import CacheShape
from worker_svc.errors import StartupFailed
from worker_svc.host_memory import available_memory
from worker_svc.kernel_choice import (
    DeviceNotFound,
    check_attention_shape,
    check_quantization,
    choose_cache_dtype,
    choose_device,
    expected_kernels,
)
from worker_svc.memory import check_num_blocks, check_swap_space, count_host_blocks
from worker_svc.model_checks import CheckedModel, IncompleteModel, read_model, unprepared
from worker_svc.model_fit import smaller_quantizations
from worker_svc.settings import WorkerSettings

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes for one worker: of weights, of one KV block (0 for an encoder), and of all KV blocks that fit."""

    weights: int
    block: int
    kv: int
    free: int
    """Before anything is loaded."""

    @property
    def num_blocks(self) -> int:
        return self.kv // self.block


def find_memory_problems(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    try:
        if (finding := unprepared(context)) is not None:
            yield finding
            return
        model = read_model(settings)
        device = choose_device(settings.device)
        estimate = estimate_memory(settings, model, device, context.num_processes)
    except (ModelNotFound, IncompleteModel, DeviceNotFound):
        yield skipped("the model or the device is wrong")
        return
    except StartupFailed as error:
        yield wrong("settings of weights and KV memory", str(error), "set it to a value that it names, or unset it")
        return
    where = "of the GPU" if device.type == "cuda" else "in the limit of the machine or its container"
    found = (
        f"for this model alone: {_gib(estimate.free)} free {where}; "
        f"weights about {_gib(estimate.weights)}, KV blocks {_gib(estimate.kv)}"
        f"{f', for each of {context.num_processes} workers' if context.num_processes > 1 else ''}"
    )
    others = smaller_quantizations(settings.quantization, device.type)
    if not estimate.block or (device.type == "cuda" and model.description is None):
        others = ()  # it is suggested for models that generate, on a GPU for native ones
    yield _judge(settings, found, estimate, context.num_processes, device, others)


def estimate_memory(
    settings: WorkerSettings, model: CheckedModel, device: torch.device, num_workers: int
) -> MemoryEstimate:
    """What `worker_svc.memory` would measure, without the peak of a step. Raises StartupFailed."""
    dtype = model.dtype(settings, device)
    if not model.has_kv:
        free = (
            torch.cuda.mem_get_info(device)[0]
            if device.type == "cuda"
            else available_memory(settings.memory_limit_bytes)
        )
        weights = model.sizes.num_bytes(dtype, model.quantization, model.kernels)
        return MemoryEstimate(weights, 0, 0, free)
    check_quantization(settings, model.description, device)
    kernels = expected_kernels(settings, model.description, dtype, device)
    shape = _cache_shape(settings, model, choose_cache_dtype(settings.kv_cache_dtype, kernels, dtype, device))
    weights = model.sizes.num_bytes(dtype, settings.quantization, kernels)
    if kernels == "compiled" and not model.is_native:
        check_attention_shape(settings, {layer.head_dim for layer in shape.layers}, dtype)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kv = int(total * (settings.memory_fraction or 0.9)) - (total - free) - weights
    else:
        free = available_memory(settings.memory_limit_bytes)
        kv = min(settings.cpu_kv_bytes, int((free - num_workers * weights) * (settings.memory_fraction or 0.4)))
    if settings.num_blocks is not None:
        check_num_blocks(settings.num_blocks, shape.block_bytes, device, settings.memory_limit_bytes)
        kv = settings.num_blocks * shape.block_bytes
    kv = max(0, kv)
    limit = settings.memory_limit_bytes
    check_swap_space(settings.swap_space, limit)
    count_host_blocks(shape.block_bytes, kv // shape.block_bytes, settings.swap_space, device, limit)
    return MemoryEstimate(weights, shape.block_bytes, kv, free)


def _cache_shape(settings: WorkerSettings, model: CheckedModel, dtype: torch.dtype) -> CacheShape:
    if model.description is not None:
        return CacheShape.of(model.description.layout, settings.block_size, dtype)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return CacheShape.of_equal_layers(config.num_hidden_layers, kv_heads, settings.block_size, head_dim, dtype)


def _judge(
    settings: WorkerSettings,
    found: str,
    estimate: MemoryEstimate,
    num_workers: int,
    device: torch.device,
    others: Sequence[str],
) -> Finding:
    on_cpu = device.type == "cpu"
    smaller = "use a smaller model or a machine with more memory"
    if others:
        smaller += f", or QUIRE_QUANTIZATION={others[0]}"
    if num_workers * estimate.weights > estimate.free:
        return wrong(found, "the weights do not fit in memory", f"{smaller}; or raise the limit of the container")
    if estimate.block == 0:
        return ok(found)
    if estimate.num_blocks == 0:
        other = "raise QUIRE_CPU_KV_BYTES" if on_cpu else "lower QUIRE_MAX_STEP_TOKENS"
        problem = f"no memory is left for a KV block of {estimate.block:,} bytes"
        return wrong(found, problem, f"raise QUIRE_MEMORY_FRACTION, {other}, or {smaller}")
    if on_cpu and "cpu_kv_bytes" in settings.model_fields_set and estimate.kv < settings.cpu_kv_bytes:
        problem = f"QUIRE_CPU_KV_BYTES is {settings.cpu_kv_bytes:,}, more than the worker will take"
        step = f"lower it to {estimate.kv:,}, free memory, or raise QUIRE_MEMORY_FRACTION (0.4 of what is left)"
        return warning(found, problem, step)
    if on_cpu and num_workers * (estimate.weights + estimate.kv) > estimate.free:
        most = max(0, estimate.free // num_workers - estimate.weights)
        return warning(found, "all workers together may take more than is free", f"set QUIRE_CPU_KV_BYTES to {most:,}")
    return ok(f"{found}: {estimate.num_blocks * settings.block_size:,} tokens")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
