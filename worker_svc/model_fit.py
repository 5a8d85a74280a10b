"""Whether a model fits into memory, seen before its weights are loaded; and if it does not, what would fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from worker_svc.cache import CacheShape
from worker_svc.host import has_bfloat16
from worker_svc.host_memory import HostMemoryReader
from worker_svc.memory import OutOfMemory
from worker_svc.model.compiled_model import COMPUTED as COMPILED
from worker_svc.model.description import ModelDescription
from worker_svc.model.support import unsupported_reason
from worker_svc.model.weights import open_weights, weight_files
from worker_svc.settings import WorkerSettings

_GIB = 2**30
_LEAST_TOKENS = 256  # of the sequence that must fit, where no setting says how long one may be
_PLAIN = {"F64", "F32", "F16", "BF16"}  # stored numbers that are converted to the dtype of the computation
_STORED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # bytes; all others have one


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """A model's numbers, from the headers of its files."""

    matrices: int
    """Numbers of matrices other than embeddings, those of experts included: what is quantized."""
    others: int
    packed_bytes: int
    """Bytes of what is stored in another form than plain numbers: it is quantized already."""

    def num_bytes(self, dtype: torch.dtype, *, is_quantized: bool = False) -> int:
        """The least memory of the weights."""
        per_number = 1 if is_quantized else dtype.itemsize
        return self.matrices * per_number + self.others * dtype.itemsize + self.packed_bytes


def read_weight_sizes(directory: Path) -> WeightSizes:
    """The sizes of a model's weights. Raises UnsupportedModel if a file is missing or damaged."""
    matrices = others = packed_bytes = 0
    for path in weight_files(directory):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                shape, stored = tensor.get_shape(), tensor.get_dtype()
                if stored not in _PLAIN:
                    packed_bytes += prod(shape) * _STORED.get(stored, 1)
                elif len(shape) > 1 and "embed" not in name:
                    matrices += prod(shape)
                else:
                    others += prod(shape)
    return WeightSizes(matrices, others, packed_bytes)


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
    directory: Path,
    description: ModelDescription | None,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Raises OutOfMemory, with what would fit, if the weights and the keys and values of one sequence exceed what is
    free, and UnsupportedModel if a file of the weights is missing or damaged. Without a description no keys and values
    are counted. `cache_dtype` is that of keys and values; None: that of the computation.
    """
    sizes = read_weight_sizes(directory)
    free, where = _free(settings, device)
    num_tokens = _num_tokens(settings, description)

    def need(
        dtype: torch.dtype, *, is_quantized: bool, num_tokens: int, cache_dtype: torch.dtype | None = cache_dtype
    ) -> _Need:
        kv = 0
        if description is not None:
            shape = CacheShape.of(description.layout, settings.block_size, cache_dtype or dtype)
            kv = -(-num_tokens // settings.block_size) * shape.block_bytes
        return _Need(sizes.num_bytes(dtype, is_quantized=is_quantized), kv)

    is_quantized = settings.quantization != "none"
    needed = need(dtype, is_quantized=is_quantized, num_tokens=num_tokens)
    if needed.all <= free:
        return
    ways = list(_ways(settings, description, device, dtype, cache_dtype, num_tokens, free, need))
    numbers = sizes.matrices + sizes.others
    largest = free // (1 if is_quantized else dtype.itemsize)
    otherwise = f"a model of at most {largest / 1e6:,.0f} million parameters, or {_gib(needed.all)} of free memory"
    kv = f" and {_gib(needed.kv)} for the keys and values of {num_tokens:,} tokens" if needed.kv else ""
    form = "8 bits" if is_quantized else str(dtype).removeprefix("torch.")
    raise OutOfMemory(
        f"the model does not fit into memory: it needs {_gib(needed.all)}: {_gib(needed.weights)} for "
        f"{numbers / 1e6:,.0f} million weights in {form}{kv}; {where} has {_gib(free)} free. "
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
    is_quantized = settings.quantization != "none"
    least = min(num_tokens, _LEAST_TOKENS)
    weights = need(dtype, is_quantized=is_quantized, num_tokens=0).weights
    if least < num_tokens and need(dtype, is_quantized=is_quantized, num_tokens=least).all <= free:
        per_block = need(dtype, is_quantized=is_quantized, num_tokens=1).kv
        num_blocks = (free - weights) // per_block
        if settings.num_blocks is not None:
            yield f"QUIRE_NUM_BLOCKS={num_blocks}"
        else:
            yield f"QUIRE_MAX_MODEL_LEN={num_blocks * settings.block_size}"
    if cache_dtype is None and device.type == "cuda" and description is not None:
        found = need(dtype, is_quantized=is_quantized, num_tokens=num_tokens, cache_dtype=torch.int8)
        if found.all <= free:
            yield f"QUIRE_KV_CACHE_DTYPE=int8 ({_gib(found.all)})"
    half = torch.bfloat16
    may_halve = dtype is torch.float32 and (device.type == "cuda" or has_bfloat16())
    if may_halve and (found := need(half, is_quantized=is_quantized, num_tokens=least)).all <= free:
        yield f"QUIRE_DTYPE=bfloat16 ({_gib(found.all)})"
    may_quantize = not is_quantized and device.type == "cpu" and settings.kernels in ("auto", "compiled")
    if may_quantize and description is not None and unsupported_reason(description, COMPILED) is None:
        for each, name in ((dtype, ""), (half, " with QUIRE_DTYPE=bfloat16")):
            found = need(each, is_quantized=True, num_tokens=least)
            if found.all <= free and (each is dtype or may_halve):
                yield f"QUIRE_QUANTIZATION=int8{name} ({_gib(found.all)})"
                return


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
