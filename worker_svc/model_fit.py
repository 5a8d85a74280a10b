"""Whether a model fits into memory, seen before its weights are loaded; and if it does not, what would fit."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from operator import add
from pathlib import Path

import torch

from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES
from quire_kernels.cpu.nibbles import DEFAULT_GROUP
from worker_svc.cache import CacheShape
from worker_svc.host import expands_bfloat16, has_bfloat16
from worker_svc.host_memory import HostMemoryReader
from worker_svc.kernel_choice import MATRIX_FORMATS, expected_kernels
from worker_svc.memory import OutOfMemory
from worker_svc.model.block_weights import joined_form
from worker_svc.model.building import drops_head
from worker_svc.model.compiled_body import COMPUTED as COMPILED
from worker_svc.model.compiled_builder import IN_NIBBLES
from worker_svc.model.description import ExpertsSpec, LinearLayer, LinearRole, ModelDescription, StoredLinear
from worker_svc.model.device_formats import COMPUTED as COMPUTED_ON_DEVICE
from worker_svc.model.device_formats import Quantization
from worker_svc.model.formats._gguf_blocks import BlockType
from worker_svc.model.formats.gguf import BLOCKS, GgufFormat
from worker_svc.model.formats.mxfp4 import STORED_ENDINGS as MXFP4_ENDINGS
from worker_svc.model.formats.mxfp4 import Mxfp4Format
from worker_svc.model.stored_linear import StoredCodes
from worker_svc.model.support import unsupported_reason
from worker_svc.model.weight_format import CodeForm, WeightFormat, format_of
from worker_svc.model.weights import Checkpoint, open_weights, weight_files
from worker_svc.settings import WorkerSettings

_GIB = 2**30
_LEAST_TOKENS = 256  # of the sequence that must fit, where no setting says how long one may be
_PER_NUMBER = {"int8": 1.0, "w8a8": 1.0, "w4a16": 0.625, "w4a8": 0.625, "fp8": 1.0}
"""Bytes of a weight, by QUIRE_QUANTIZATION: a group of 32 numbers in 4 bits has 4 bytes more."""
_SMALLER = {"none": ("int8", "w4a16"), "int8": ("w4a16",), "w8a8": ("w4a8",)}
_SMALLER_ON_GPU = _SMALLER | {"w8a8": ("w4a16",), "fp8": ("w4a16",)}
_FORMS = {"int8": "8 bits", "w8a8": "8 bits", "w4a16": "4 bits", "w4a8": "4 bits", "fp8": "8 bits"}
_PLAIN = {"F64", "F32", "F16", "BF16"}  # stored numbers that are converted to the dtype of the computation
_DENSE = ("embed", "kv_b_proj")  # matrices that are not quantized: see `CompiledBuilder.latent`
_STORED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # bytes; all others have one


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """A model's numbers, from the headers of its files."""

    matrices: int = 0
    """Numbers of matrices that are quantized, those of experts included."""
    head: int = 0
    """Numbers of the head. Where matrices have 4 bits or 8, it has 8 on a CPU, and those of the dtype on a GPU."""
    others: int = 0
    packed_bytes: int = 0
    """Bytes of what is stored in another form than plain numbers: it is quantized already."""
    block_numbers: int = 0
    """Numbers of matrices in blocks of GGUF, the head included, and in MXFP4."""
    block_bytes: int = 0
    """What they take with their own codes."""
    head_block_numbers: int = 0
    """Numbers of a head in blocks, among `block_numbers`; 0 where it is the embedding."""
    head_block_bytes: int = 0
    """What a head in blocks takes with its own codes, among `block_bytes`, also where it is the embedding."""

    def __add__(self, other: "WeightSizes") -> "WeightSizes":
        return WeightSizes(*map(add, astuple(self), astuple(other)))

    def num_bytes(self, dtype: torch.dtype, quantization: str = "none", device: str = "cpu") -> int:
        """The least memory of the weights on a device of this type."""
        of_matrices = int(self.matrices * bytes_per_weight(quantization, dtype))
        of_head = self.head * (1 if quantization in _PER_NUMBER and device == "cpu" else dtype.itemsize)
        of_blocks = self.block_numbers * dtype.itemsize
        if quantization in _PER_NUMBER:
            of_blocks = self.block_bytes
            if device == "cuda":  # where the head is in the dtype
                of_blocks += self.head_block_numbers * dtype.itemsize - self.head_block_bytes
        return of_matrices + of_head + self.others * dtype.itemsize + self.packed_bytes + of_blocks


def bytes_per_weight(quantization: str, dtype: torch.dtype) -> float:
    """What a number of a matrix takes, with a value of QUIRE_QUANTIZATION."""
    return _PER_NUMBER.get(quantization, float(dtype.itemsize))


def smaller_quantizations(quantization: str, device: str) -> tuple[str, ...]:
    """Values of QUIRE_QUANTIZATION with which weights take less than with this one, on a device of a type."""
    return (_SMALLER_ON_GPU if device == "cuda" else _SMALLER).get(quantization, ())


def read_weight_sizes(directory: Path) -> WeightSizes:
    """The sizes of a model's weights. Raises UnsupportedModel if a file is missing or damaged."""
    sizes = WeightSizes()
    for path in weight_files(directory):
        with open_weights(path) as file:
            names = list(file.keys())
            blocks = _block_types(directory, names)
            is_mxfp4 = any(map(_is_mxfp4, names)) and isinstance(format_of(directory), Mxfp4Format)
            is_tied = not any(name.startswith("lm_head.") for name in names)
            for name in names:
                tensor = file.get_slice(name)
                if name in blocks:
                    sizes += _sizes_of_blocks(name, prod(tensor.get_shape()), blocks[name], is_tied=is_tied)
                elif is_mxfp4 and _is_mxfp4(name):
                    sizes += _sizes_of_mxfp4(name, prod(tensor.get_shape()))
                else:
                    sizes += _sizes_of_numbers(name, tensor.get_shape(), tensor.get_dtype())
    return sizes


def _sizes_of_blocks(name: str, stored_bytes: int, kind: BlockType, *, is_tied: bool) -> WeightSizes:
    """The sizes of one tensor of blocks. With `is_tied` the embedding is the head too."""
    numbers = stored_bytes // kind.num_bytes * kind.numbers
    held = int(numbers * joined_form([kind]).bytes_held)
    if "embed" in name:
        # It is dense, and with its own codes the head besides, but for vectors of each layer's own.
        of_head = held if is_tied and "per_layer" not in name else 0
        return WeightSizes(others=numbers, block_bytes=of_head, head_block_bytes=of_head)
    if name.startswith("lm_head."):
        return WeightSizes(block_numbers=numbers, block_bytes=held, head_block_numbers=numbers, head_block_bytes=held)
    return WeightSizes(block_numbers=numbers, block_bytes=held)


def _is_mxfp4(name: str) -> bool:
    return name.endswith(MXFP4_ENDINGS)


def _sizes_of_mxfp4(name: str, stored_bytes: int) -> WeightSizes:
    """The sizes of one tensor of MXFP4. Scales are counted with their codes."""
    codes, _ = MXFP4_ENDINGS
    numbers = 2 * stored_bytes if name.endswith(codes) else 0
    return WeightSizes(block_numbers=numbers, block_bytes=int(numbers * CodeForm(4, DEFAULT_GROUP).bytes_held))


def _sizes_of_numbers(name: str, shape: Sequence[int], stored: str) -> WeightSizes:
    """The sizes of one tensor of numbers of this dtype."""
    count = prod(shape)
    if stored not in _PLAIN:
        return WeightSizes(packed_bytes=count * _STORED.get(stored, 1))
    if name.startswith("lm_head."):
        return WeightSizes(head=count)
    if len(shape) > 1 and not any(part in name for part in _DENSE):
        return WeightSizes(matrices=count)
    return WeightSizes(others=count)


def _block_types(directory: Path, names: Iterable[str]) -> Mapping[str, BlockType]:
    """The types of tensors that are blocks of GGUF, by their names."""
    stored = [name for name in names if name.endswith(BLOCKS)]
    weight_format = format_of(directory) if stored else None
    if not isinstance(weight_format, GgufFormat):
        return {}
    layers = {name: name.removesuffix(BLOCKS) for name in stored}
    return {name: weight_format.type_of(layer) for name, layer in layers.items() if weight_format.has_blocks(layer)}


def kept_bytes(
    description: ModelDescription,
    weight_format: WeightFormat,
    names: Collection[str],
    dtype: torch.dtype,
    quantization: str,
    kernels: str,
) -> int:
    """What the weights of a model take that Quire's kernels of a `kernel_name` compute, with the codes that they keep
    of a checkpoint. `names` are those of its tensors, as the description has them; a head among them takes memory.

    All groups of 4 bits are taken to have 32 inputs, and all stored groups to be such that a product can have them.
    """
    experts: set[LinearLayer] = set()
    in_model_dtype: set[LinearLayer] = set()
    for layer in description.layers:
        if (latent := layer.attention.latent) is not None:
            in_model_dtype.add(latent.kv_up)
        if isinstance(layer.mlp, ExpertsSpec):
            # A shared MLP is one more expert on a processor, and a layer as all others on a GPU.
            mlps = layer.mlp.mlps if kernels == "compiled" else layer.mlp.experts
            experts |= {linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)}

    def of_number(linear: LinearLayer) -> float:
        asked = quantization if linear.computed is None else linear.computed.value
        is_head = linear.role is LinearRole.HEAD
        if asked not in _PER_NUMBER or linear in in_model_dtype or (is_head and kernels == "triton"):
            return dtype.itemsize
        codes, of_expert = StoredCodes.of(linear, weight_format, names), linear in experts
        if codes.has_blocks if is_head else codes.keeps_blocks(of_expert=of_expert):
            return _blocks_form(linear, weight_format, takes_e2m1=_takes_e2m1(asked, kernels)).bytes_held
        if is_head:
            return 1.0
        if codes.keeps_nibbles(of_expert=of_expert) and _keeps_nibbles(asked, kernels):
            return CodeForm(4, DEFAULT_GROUP).bytes_held
        return _PER_NUMBER[asked]

    of_tables = sum(map(prod, description.shapes.values())) * dtype.itemsize
    linear_layers = _laid_out(description, kernels, names)
    return of_tables + int(sum(of_number(linear) * linear.inputs * sum(linear.outputs) for linear in linear_layers))


def _laid_out(description: ModelDescription, kernels: str, names: Collection[str]) -> Iterator[LinearLayer]:
    """The layers that take memory beside the embedding. Only the compiled kernels have another copy of it as a head."""
    *layers, head = description.linear_layers
    yield from layers
    if not description.tied_embeddings or f"{head.stored[0].name}.weight" in names:
        yield head
    elif kernels == "compiled":
        yield replace(head, stored=(StoredLinear(description.embedding.removesuffix(".weight"), head.outputs),))


def _takes_e2m1(quantization: str, kernels: str) -> bool:
    """Whether products keep codes of e2m1 in 4 bits."""
    return kernels == "compiled" and not MATRIX_FORMATS[quantization].takes_codes


def _blocks_form(layer: LinearLayer, weight_format: WeightFormat, *, takes_e2m1: bool) -> CodeForm:
    """The form of a layer that `read_blocks` reads."""
    if takes_e2m1 and isinstance(weight_format, Mxfp4Format):
        return CodeForm(4, DEFAULT_GROUP)
    if not isinstance(weight_format, GgufFormat):
        return CodeForm(8, BYTE_GROUP_SIZES[-1])
    names = [stored.name for stored in layer.stored]
    kinds = [weight_format.type_of(name) if weight_format.has_blocks(name) else None for name in names]
    # A product is of e2m1 if all parts are.
    takes_e2m1 = takes_e2m1 and all(kind is not None and kind.is_e2m1 for kind in kinds)
    return joined_form([kind and kind.form(takes_e2m1=takes_e2m1) for kind in kinds])


def _keeps_nibbles(quantization: str, kernels: str) -> bool:
    if kernels == "triton":
        return Quantization(quantization).keeps_nibbles
    return MATRIX_FORMATS[quantization] in IN_NIBBLES


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
        dtype: torch.dtype, quantization: str, num_tokens: int, cache_dtype: torch.dtype | None = cache_dtype
    ) -> _Need:
        kv = 0
        if description is not None:
            shape = CacheShape.of(description.layout, settings.block_size, cache_dtype or dtype)
            kv = -(-num_tokens // settings.block_size) * shape.block_bytes
        return _Need(sizes.num_bytes(dtype, quantization, device.type), kv)

    quantization = settings.quantization
    needed = need(dtype, quantization, num_tokens)
    if needed.all > free and _leaves_head(settings, directory, description, device, dtype):
        sizes = replace(sizes, head=0)
        needed = need(dtype, quantization, num_tokens)
    if needed.all <= free:
        return
    ways = list(_ways(settings, description, device, dtype, cache_dtype, num_tokens, free, need))
    numbers = sizes.matrices + sizes.head + sizes.others + sizes.block_numbers
    largest = free / bytes_per_weight(quantization, dtype)
    otherwise = f"a model of at most {largest / 1e6:,.0f} million parameters, or {_gib(needed.all)} of free memory"
    kv = f" and {_gib(needed.kv)} for the keys and values of {num_tokens:,} tokens" if needed.kv else ""
    form = _FORMS.get(quantization, str(dtype).removeprefix("torch."))
    raise OutOfMemory(
        f"the model does not fit into memory: it needs {_gib(needed.all)}: {_gib(needed.weights)} for "
        f"{numbers / 1e6:,.0f} million weights in {form}{kv}; {where} has {_gib(free)} free. "
        f"What would fit: {'; '.join([*ways, otherwise])}"
    )


def _leaves_head(
    settings: WorkerSettings,
    directory: Path,
    description: ModelDescription | None,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Whether a stored head takes no memory, since the embedding is the head. Reads both: only for a model that else
    does not fit.
    """
    if description is None or expected_kernels(settings, description, dtype, device) == "compiled":
        return False
    return drops_head(description, Checkpoint(directory, format_of(directory), dtype, torch.device("cpu")))


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
