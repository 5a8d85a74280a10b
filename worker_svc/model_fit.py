"""Whether a model fits into memory, seen before its weights are loaded; and if it does not, what would fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire_kernels.cpu.attention import check_compiled_support
from worker_svc.cache import CacheShape
from worker_svc.host import expands_bfloat16, has_bfloat16
from worker_svc.host_memory import HostMemoryReader
from worker_svc.memory import OutOfMemory
from worker_svc.model.compiled_body import COMPUTED as COMPILED
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import COMPUTED as COMPUTED_ON_DEVICE
from worker_svc.model.support import unsupported_reason
from worker_svc.settings import WorkerSettings
from worker_svc.weight_sizes import WeightSizes, bytes_per_weight

_GIB = 2**30
_LEAST_TOKENS = 256  # of the sequence that must fit, where no setting says how long one may be
_SMALLER = {"none": ("int8", "w4a16"), "int8": ("w4a16",), "w8a8": ("w4a8",)}
_SMALLER_ON_GPU = _SMALLER | {"w8a8": ("w4a16",), "fp8": ("w4a16",)}
_FORMS = {"int8": "8 bits", "w8a8": "8 bits", "w4a16": "4 bits", "w4a8": "4 bits", "fp8": "8 bits"}


def smaller_quantizations(quantization: str, device: str) -> tuple[str, ...]:
    """Values of QUIRE_QUANTIZATION with which weights take less than with this one, on a device of a type."""
    return (_SMALLER_ON_GPU if device == "cuda" else _SMALLER).get(quantization, ())


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes that a model needs at least, in one way to serve it."""

    weights: int
    kv: int

    @property
    def all(self) -> int:
        return self.weights + self.kv


def check_fits(
    settings: WorkerSettings,
    sizes: WeightSizes,
    kernels: str,
    description: ModelDescription | None,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Raises OutOfMemory, with what would fit, if the weights and the keys and values of one sequence exceed what is
    free.

    `kernels` is the `kernel_name` of what computes the model. Without a description no keys and values are counted.
    `cache_dtype` is that of keys and values; None: that of the computation.
    """
    free, where = _free(settings, device)
    num_tokens = _num_tokens(settings, description)

    def need(
        dtype: torch.dtype, quantization: str, num_tokens: int, cache_dtype: torch.dtype | None = cache_dtype
    ) -> _Need:
        kv = 0
        if description is not None:
            shape = CacheShape.of(description.layout, settings.block_size, cache_dtype or dtype)
            kv = -(-num_tokens // settings.block_size) * shape.block_bytes
        # On a processor the compiled kernels alone compute other formats than the checkpoint's.
        by = kernels if quantization == "none" or device.type == "cuda" else "compiled"
        return _Need(sizes.num_bytes(dtype, quantization, by), kv)

    quantization = settings.quantization
    needed = need(dtype, quantization, num_tokens)
    if needed.all <= free:
        return
    ways = list(_ways(settings, description, device, dtype, cache_dtype, num_tokens, free, need))
    largest = free / bytes_per_weight(quantization, dtype)
    otherwise = f"a model of at most {largest / 1e6:,.0f} million parameters, or {_gib(needed.all)} of free memory"
    kv = f" and {_gib(needed.kv)} for the keys and values of {num_tokens:,} tokens" if needed.kv else ""
    form = _FORMS.get(quantization, str(dtype).removeprefix("torch."))
    raise OutOfMemory(
        f"the model does not fit into memory: it needs {_gib(needed.all)}: {_gib(needed.weights)} for "
        f"{sizes.num_weights / 1e6:,.0f} million weights in {form}{kv}; {where} has {_gib(free)} free. "
        f"What would fit: {'; '.join([*ways, otherwise])}"
    )


def _ways(
    settings: WorkerSettings,
    description: ModelDescription | None,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    num_tokens: int,
    free: int,
    need: Callable[..., _Need],
) -> Iterator[str]:
    """Settings with which the model would fit, the one that changes least first."""

    def way(dtype: torch.dtype, quantization: str, *names: str) -> str | None:
        """These settings, and one for fewer keys and values where they need it; None: they are not enough."""
        found = need(dtype, quantization, num_tokens)
        if found.all > free:
            if num_tokens <= _LEAST_TOKENS or need(dtype, quantization, _LEAST_TOKENS).all > free:
                return None
            num_blocks = (free - found.weights) // need(dtype, quantization, 1).kv
            found = need(dtype, quantization, num_blocks * settings.block_size)
            names = *names, _cache_setting(settings, num_blocks)
        first, *others = names
        return f"{first}{' with ' if others else ''}{' and '.join(others)} ({_gib(found.all)})"

    quantization, half, in_half = settings.quantization, torch.bfloat16, "QUIRE_DTYPE=bfloat16"
    on_gpu = device.type == "cuda"
    ways: list[str | None] = [way(dtype, quantization)] if num_tokens > _LEAST_TOKENS else []
    has_compiled = settings.kernels in ("auto", "compiled") and (
        description is None or check_compiled_support(description.layout.head_dims, settings.block_size, dtype) is None
    )
    if cache_dtype is None and description is not None and (on_gpu or has_compiled):
        in_8_bits = need(dtype, quantization, num_tokens, cache_dtype=torch.int8).all
        ways.append(f"QUIRE_KV_CACHE_DTYPE=int8 ({_gib(in_8_bits)})" if in_8_bits <= free else None)
    is_compiled = has_compiled and description is not None and unsupported_reason(description, COMPILED) is None
    may_halve = dtype is torch.float32 and (on_gpu or has_bfloat16() or (is_compiled and expands_bfloat16()))
    if may_halve:
        ways.append(way(half, quantization, in_half))
    computed = COMPUTED_ON_DEVICE if on_gpu else COMPILED
    if (on_gpu or has_compiled) and description is not None and unsupported_reason(description, computed) is None:
        smaller = [(name, f"QUIRE_QUANTIZATION={name}") for name in smaller_quantizations(quantization, device.type)]
        quantized = (
            way(dtype, name, setting) or (way(half, name, setting, in_half) if may_halve else None)
            for name, setting in smaller
        )
        ways.append(next(filter(None, quantized), None))
    return filter(None, ways)


def _cache_setting(settings: WorkerSettings, num_blocks: int) -> str:
    """The setting for so many blocks of keys and values."""
    if settings.num_blocks is not None:
        return f"QUIRE_NUM_BLOCKS={num_blocks}"
    return f"QUIRE_MAX_MODEL_LEN={num_blocks * settings.block_size}"


def _num_tokens(settings: WorkerSettings, description: ModelDescription | None) -> int:
    """Tokens whose keys and values must fit: those of the settings, else those of a short sequence."""
    if description is None:
        return 0
    if settings.num_blocks is not None:
        return settings.num_blocks * settings.block_size
    return settings.max_model_len or min(_LEAST_TOKENS, description.context_length)


def _free(settings: WorkerSettings, device: torch.device) -> tuple[int, str]:
    """Bytes that a model may take, and what sets the limit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(total * (settings.memory_fraction or 0.9))), "the GPU"
    reader = HostMemoryReader(settings.memory_limit_bytes)
    source = reader.read().source
    return reader.available(), f"the container ({source})" if source.startswith("cgroup") else source


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
