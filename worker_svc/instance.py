"""Loads a model, sizes its cache and warms it up: from settings to a runner that is ready for steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.library import BuildFailed, load_library
from quire_kernels.cpu.thread_pool import ThreadPool
from svc_common.models import cache_root, resolve_model, tokenizer_fingerprint
from worker_svc.attention import AttentionKind, CompiledKernels, Kernels
from worker_svc.block_copier import RateLimiter, make_block_copier
from worker_svc.cache import CacheShape, KVCache
from worker_svc.description import WorkerDescription, WorkerLimits
from worker_svc.errors import StartupFailed
from worker_svc.executor import CudaGraphOptions
from worker_svc.fingerprint import model_fingerprint
from worker_svc.host import available_cpus, has_bfloat16
from worker_svc.memory import (
    MemoryBudget,
    OutOfMemory,
    check_num_blocks,
    check_swap_space,
    count_blocks,
    count_host_blocks,
)
from worker_svc.model.compiled import COMPUTED as COMPILED
from worker_svc.model.description import ModelDescription
from worker_svc.model.description_cache import description_of
from worker_svc.model.loading import LoadedModel, load, unsupported_natively
from worker_svc.model.support import unsupported_reason
from worker_svc.prefault import BYTES_BEFORE_READY, Prefault
from worker_svc.progress import progress
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.warm_up import measure_prefill, measure_swaps, run_largest_step, warm_up

# Tokens and sequences of a step. On 2 cores a prompt's tokens are computed fastest, and the streams beside it wait
# least, in chunks of 256. A GPU needs more to be busy.
_BUDGETS = {"cpu": (256, 64), "cuda": (2048, 256)}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Of the first GPUs that convert float8_e4m3fn: Ada Lovelace.
_FP8_CAPABILITY = (8, 9)


class DeviceNotFound(StartupFailed):
    """The device that the settings ask for is not there. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """A loaded model, warm. The runner is for one thread."""

    description: WorkerDescription
    runner: Runner


def load_instance(settings: WorkerSettings, report: Callable[[str], None]) -> ModelInstance:
    """Load what the settings name, in seconds to minutes; `report` is told what takes long, on another thread.

    Raises ModelNotFound, or StartupFailed as UnsupportedModel, DeviceNotFound, OutOfMemory and itself: with a text for
    the operator.
    """
    check_swap_space(settings.swap_space)
    served = resolve_model(settings.model, settings.revision, settings.tokenizer, settings.tokenizer_revision)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    model_description = description_of(served.path)
    if model_description is not None:
        # Before the weights are loaded, which takes minutes for a large model. Rotary positions do not depend on it.
        limit = _context_length(settings.max_model_len, model_description.context_length)
        model_description = replace(model_description, context_length=limit)
    kernels = _kernels(settings, model_description, dtype, device, report)
    native = _native(model_description, kernels, device, report)
    arithmetic = _arithmetic(kernels, native, device) if settings.deterministic else ""
    with progress(f"loading {served.name}", report):
        model = load(served.path, native, dtype, device, kernels, deterministic=settings.deterministic)
    if native is None and isinstance(kernels, CompiledKernels):
        refused = check_compiled_support(model.layout.head_dim, settings.block_size, dtype)
        if refused is not None and settings.kernels == "compiled":
            raise StartupFailed(f"the compiled kernels cannot be used: {refused}")
        if refused is not None:
            report(f"torch computes the attention, which is slower than compiled kernels: {refused}")
    if served.other_tokenizer is not None:
        _check_vocabulary(served.other_tokenizer, model.layout.vocab_size)
    default_step_tokens, default_sequences = _BUDGETS[device.type]
    shape = CacheShape.of(
        model.layout, settings.block_size, _cache_dtype(settings.kv_cache_dtype, kernels, dtype, device)
    )
    limits = WorkerLimits(
        vocab_size=model.layout.vocab_size,
        context_length=_context_length(settings.max_model_len, model.layout.context_length),
        block_size=settings.block_size,
        num_blocks=0,
        max_step_tokens=settings.max_step_tokens or default_step_tokens,
        max_sequences=settings.max_sequences or default_sequences,
    )
    with progress("measuring memory", report):
        limits = replace(limits, num_blocks=_num_blocks(settings, model, device, shape, limits))
        num_host_blocks = count_host_blocks(shape.block_bytes, limits.num_blocks, settings.swap_space, device)
        limits = replace(limits, num_host_blocks=num_host_blocks)
    graphs = CudaGraphOptions(settings.cuda_graphs, _capture_reporter(report))
    cache = shape.allocate(limits.num_blocks, device)
    prefault = Prefault(cache.blocks, torch.get_num_threads()) if device.type == "cpu" else None
    runner = _make_runner(model, cache, shape, limits, graphs, settings.swap_rate)
    with progress("warming up", report):
        warm_up(runner)
        prefill_rate = measure_prefill(runner)
        swap_rate = measure_swaps(runner, shape.block_bytes, settings.swap_rate)
    description = WorkerDescription(
        model=served.name,
        fingerprint=model_fingerprint(served.path, dtype, settings.quantization, settings.kv_cache_dtype, arithmetic),
        tokenizer_fingerprint=tokenizer_fingerprint(served.tokenizer_path),
        block_bytes=shape.block_bytes,
        limits=limits,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        swap_bytes_per_second=swap_rate,
        prefill_tokens_per_second=prefill_rate,
    )
    if prefault is not None:
        with progress("taking memory for the cache", report):
            prefault.wait_for(BYTES_BEFORE_READY)
        prefault.continue_while(lambda: runner.is_idle)
    return ModelInstance(description, runner)


def _context_length(max_model_len: int | None, of_model: int) -> int:
    """How many tokens a sequence may have. Raises StartupFailed where that is more than the model was made for."""
    if max_model_len is None:
        return of_model
    if max_model_len > of_model:
        raise StartupFailed(
            f"QUIRE_MAX_MODEL_LEN is {max_model_len}, and the context length of the model is {of_model} tokens"
        )
    return max_model_len


def _check_vocabulary(tokenizer: Path, vocab_size: int) -> None:
    """Raises StartupFailed where a tokenizer that is not the model's own has ids that the model does not."""
    from tokenizers import Tokenizer

    try:
        token_ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab().values()
    except Exception as error:  # tokenizers raises nothing narrower
        raise StartupFailed(f"QUIRE_TOKENIZER: {tokenizer / 'tokenizer.json'} cannot be used: {error}") from error
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise StartupFailed(
            f"QUIRE_TOKENIZER: {tokenizer} has token ids up to {highest}, and the model's vocabulary has {vocab_size}"
        )


def _device(choice: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if choice == "cuda" and not has_gpu:
        raise DeviceNotFound("QUIRE_DEVICE is cuda, and torch finds no GPU")
    return torch.device("cuda", 0) if has_gpu and choice != "cpu" else torch.device("cpu")


def _dtype(choice: str, device: torch.device) -> torch.dtype:
    if choice != "auto":
        return _DTYPES[choice]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_bfloat16() else torch.float32


def _kernels(
    settings: WorkerSettings,
    model_description: ModelDescription | None,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> Kernels:
    """What computes, as the settings want it or as suits the device best."""
    choice, int8 = settings.kernels, settings.quantization == "int8"
    on_gpu = device.type == "cuda"
    if int8 and choice in ("torch", "triton"):
        raise StartupFailed(
            f"QUIRE_QUANTIZATION is int8, which compiled kernels compute, and QUIRE_KERNELS is {choice}"
        )
    if on_gpu and (choice in ("torch", "compiled") or int8):
        what = "QUIRE_QUANTIZATION is int8" if int8 else f"QUIRE_KERNELS is {choice}"
        raise DeviceNotFound(f"{what}, which is for processors, and the device is a GPU")
    if on_gpu or choice == "triton":
        return AttentionKind.TRITON
    if choice == "torch":
        return AttentionKind.TORCH
    if model_description is not None and unsupported_reason(model_description, COMPILED) is None:
        refused = check_compiled_support(model_description.layout.head_dim, settings.block_size, dtype)
    else:
        # Of other models they compute the attention, if its shape lets them: that is known once the model is loaded.
        refused = "of the model, only those of the Llama family take weights in 8 bits" if int8 else None
    if refused is None:
        try:
            library = load_library(cache_root() / "kernels", report)
        except BuildFailed as error:
            refused = str(error)
        else:
            return CompiledKernels(ThreadPool(library, torch.get_num_threads()), int8)
    if choice == "compiled" or int8:
        raise StartupFailed(f"the compiled kernels cannot be used: {refused}")
    report(f"torch computes, which is slower than compiled kernels: {refused}")
    return AttentionKind.TORCH


def _native(
    model_description: ModelDescription | None, kernels: Kernels, device: torch.device, report: Callable[[str], None]
) -> ModelDescription | None:
    """The model_description, if the backend of these kernels computes it."""
    if model_description is None:
        return None
    refused = unsupported_natively(model_description, kernels, device)
    if refused is not None:
        report(f"transformers' modules compute the model, which is slower: the kernels do not compute {refused}")
        return None
    return model_description


def _arithmetic(kernels: Kernels, native: ModelDescription | None, device: torch.device) -> str:
    """What makes a token's bits, in deterministic mode: equal names mean equal bits. Raises StartupFailed."""
    refusal = "QUIRE_DETERMINISTIC cannot be kept"
    if native is None:
        raise StartupFailed(f"{refusal}: only models of the Llama family are computed by kernels that keep it")
    if isinstance(kernels, CompiledKernels):
        return f"compiled {kernels.thread_pool.library_name}"
    if device.type == "cuda":
        import triton

        return f"triton {triton.__version__} {torch.__version__} {torch.cuda.get_device_name(device)}"
    raise StartupFailed(f"{refusal} by {kernels} on a processor: only the compiled kernels do so there")


def _cache_dtype(choice: str, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in."""
    if choice == "auto":
        return dtype
    if kernels is not AttentionKind.TRITON:
        raise StartupFailed(f"QUIRE_KV_CACHE_DTYPE is {choice}, which is for a GPU: on a processor it can only be auto")
    if choice == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise StartupFailed("QUIRE_KV_CACHE_DTYPE is fp8, which this GPU does not convert: int8 can be had, or auto")
    return _CACHE_DTYPES[choice]


def _make_runner(
    model: LoadedModel,
    cache: KVCache,
    shape: CacheShape,
    limits: WorkerLimits,
    graphs: CudaGraphOptions,
    swap_rate: float | None = None,
) -> Runner:
    host_blocks = shape.allocate_host(limits.num_host_blocks)
    if cache.device.type == "cuda" and limits.num_host_blocks:
        from worker_svc.gpu.staging import pin

        try:
            pin(host_blocks)
        except RuntimeError as error:
            raise OutOfMemory(
                f"QUIRE_SWAP_SPACE: {host_blocks.nbytes} bytes of the host's memory cannot be pinned: {error}"
            ) from error
    executor = model.executor(cache, limits, graphs)
    return Runner(executor, limits, make_block_copier(executor, cache, host_blocks, RateLimiter(swap_rate)))


def _num_blocks(
    settings: WorkerSettings, model: LoadedModel, device: torch.device, shape: CacheShape, limits: WorkerLimits
) -> int:
    if settings.num_blocks is not None:
        check_num_blocks(settings.num_blocks, shape.block_bytes, device)
        return settings.num_blocks
    budget = MemoryBudget(settings.memory_fraction, settings.cpu_kv_bytes)

    def make_runner(needed: WorkerLimits) -> Runner:
        cache = shape.allocate(needed.num_blocks, device)
        return _make_runner(model, cache, shape, needed, CudaGraphOptions(settings.cuda_graphs))

    def profile() -> Runner:
        return run_largest_step(limits, make_runner)

    num_blocks = count_blocks(shape.block_bytes, budget, device, profile)
    if num_blocks == 0:
        names = ("QUIRE_MEMORY_FRACTION", "QUIRE_CPU_KV_BYTES" if device.type == "cpu" else "QUIRE_MAX_STEP_TOKENS")
        raise OutOfMemory(
            f"no memory is left for keys and values, of which a block takes {shape.block_bytes} bytes: "
            f"{names[0]} and {names[1]} say how much there is, and a smaller model needs less"
        )
    return num_blocks


def _capture_reporter(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Tells of graphs that are captured, a few lines in all."""

    def report_capture(captured: int, of: int) -> None:
        if captured % 8 == 0 or captured == of:
            report(f"captured {captured} of {of} graphs")

    return report_capture
