"""Loads a model, sizes its cache and warms it up: from settings to a runner that is ready for steps."""

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from svc_common.grammars import UnsupportedTokenizer, load_grammar_tokenizer
from svc_common.models import (
    DamagedModelFile,
    ServedModel,
    eos_token_ids_of,
    tokenizer_fingerprint,
    tokenizer_setting,
)
from svc_common.tokenizer_errors import tokenizer_errors
from worker_svc.attention import AttentionKind, CompiledKernels, Kernels
from worker_svc.block_copier import RateLimiter
from worker_svc.block_copier_factory import make_block_copier
from worker_svc.cache import CacheShape, KVCache
from worker_svc.description import WorkerDescription, WorkerLimits, context_length_of
from worker_svc.drafting import DrafterFactory, find_drafter
from worker_svc.errors import StartupFailed
from worker_svc.executor import CudaGraphOptions
from worker_svc.fingerprint import model_fingerprint
from worker_svc.gpu.device_attention import check_attention_backend
from worker_svc.grammar import GrammarCompiler
from worker_svc.host import available_cpus
from worker_svc.host_memory import HostMemoryReader
from worker_svc.kernel_choice import (
    arithmetic_name,
    check_attention_shape,
    choose_cache_dtype,
    choose_decoder_dtype,
    choose_device,
    choose_dtype,
    choose_kernels,
    choose_native,
    kernel_name,
    quantization_of_device,
)
from worker_svc.memory import (
    MemoryBudget,
    OutOfMemory,
    check_num_blocks,
    check_swap_space,
    count_blocks,
    count_host_blocks,
)
from worker_svc.memory_parts import MemoryAccount
from worker_svc.model.description import ModelDescription
from worker_svc.model.description_cache import description_of
from worker_svc.model.device_formats import Quantization
from worker_svc.model.loading import LoadedModel, load
from worker_svc.model.weights import ReadMeter
from worker_svc.model_fit import check_fits
from worker_svc.prefault import BYTES_BEFORE_READY, Prefault
from worker_svc.progress import progress
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.warm_up import RepeatingDrafter, measure_prefill, measure_swaps, run_largest_step, warm_up
from worker_svc.weight_sizes import read_decoder_sizes, read_header_sizes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Tokens of a step, usually and at most, and its sequences. On 2 cores a prompt's tokens are computed fastest in chunks
# of 256, and almost as fast in chunks of 128, which delay other streams less; beside many decodes, which take long
# themselves, larger ones delay new streams less. A GPU needs more to be busy.
_BUDGETS = {"cpu": (256, 512, 64), "cuda": (2048, 2048, 256)}
# On a CPU a step may hold one sequence for each of so many tokens of KV memory, at least those above and at most 256.
# On a GPU a row takes memory for each token of the vocabulary, and graphs for its size.
_TOKENS_OF_SEQUENCE, _MOST_SEQUENCES = 2048, 256


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """A loaded, warm decoder. The runner is for one thread."""

    description: WorkerDescription
    runner: Runner
    memory: MemoryAccount
    prefault: Prefault | None = None
    """Of the cache, while it runs and after it; None: of a cache that needs none."""

    def close(self) -> None:
        """As `StepInstance` says."""
        if self.prefault is not None:
            self.prefault.stop()
        self.memory.close()
        self.runner.close()
        release_device(self.description.device)


def load_instance(settings: WorkerSettings, report: Callable[[str], None]) -> ModelInstance:
    """Loads the decoder of the settings, in seconds to minutes. `report` receives progress lines, on another thread.

    Raises ModelNotFound, or StartupFailed and its subclasses UnsupportedModel, DeviceNotFound and OutOfMemory, with a
    text for the operator.
    """
    check_swap_space(settings.swap_space, settings.memory_limit_bytes)
    make_drafter = None if settings.drafter == "none" else find_drafter(settings.drafter)
    served = settings.served_model()
    device = choose_device(settings.device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    chosen = _choose_computation(settings, served.path, device, report)
    memory, meter = MemoryAccount(device), ReadMeter()
    with progress(f"loading {served.name}", report, meter.share):
        model = load(
            served.path,
            chosen.native,
            chosen.dtype,
            device,
            chosen.kernels,
            deterministic=settings.deterministic,
            attention_backend=settings.attention_backend,
            quantization=chosen.quantization,
            meter=meter,
        )
    memory.note_weights()
    if chosen.native is None and isinstance(chosen.kernels, CompiledKernels):
        refused = check_attention_shape(settings, model.layout.head_dims, chosen.dtype)
        if refused is not None:
            report(f"torch computes the attention, slower than the compiled kernels: {refused}")
    if served.other_tokenizer is not None:
        setting = tokenizer_setting(settings.tokenizer)
        check_vocabulary(served.other_tokenizer, model.layout.vocab_size, setting)
    # Made in the background, while memory is measured and the model warms up.
    grammars = GrammarCompiler(
        partial(_load_grammar_tokenizer, served), model.layout.vocab_size, max(1, available_cpus() // 2)
    )
    shape = CacheShape.of(model.layout, settings.block_size, chosen.cache_dtype)
    with progress("measuring memory", report):
        limits = _measure_limits(settings, model, device, shape, has_drafter=make_drafter is not None)
    graphs = CudaGraphOptions(settings.cuda_graphs, _capture_reporter(report))
    cache = shape.allocate(limits.num_blocks, device)
    room = partial(HostMemoryReader(settings.memory_limit_bytes).room, settings.memory_high)
    prefault = Prefault(cache.blocks, torch.get_num_threads(), room) if device.type == "cpu" else None
    host_blocks = shape.allocate_host(limits.num_host_blocks)
    memory.note_blocks(cache.blocks, host_blocks)
    with memory.capture() if device.type == "cuda" and settings.cuda_graphs else nullcontext():
        runner = _make_runner(model, cache, host_blocks, limits, graphs, settings.swap_rate, make_drafter, grammars)
    with progress("warming up", report):
        warm_up(runner, device.type)
        prefill_rate = measure_prefill(runner)
        swap_rate = measure_swaps(runner, shape.block_bytes, settings.swap_rate)
        without_grammars = grammars.warm_up()
    if without_grammars is not None:
        report(f"requests with a grammar fail: {without_grammars}")
    description = WorkerDescription(
        model=served.name,
        fingerprint=model_fingerprint(
            served.path, chosen.dtype, settings.quantization, settings.kv_cache_dtype, chosen.arithmetic
        ),
        tokenizer_fingerprint=tokenizer_fingerprint(served.tokenizer_path),
        block_bytes=shape.block_bytes,
        limits=limits,
        dtype=str(chosen.dtype).removeprefix("torch."),
        device=str(device),
        swap_bytes_per_second=swap_rate,
        prefill_tokens_per_second=prefill_rate,
    )
    if prefault is not None:
        with progress("taking memory for the cache", report):
            prefault.wait_for(BYTES_BEFORE_READY)
        prefault.continue_while(lambda: runner.is_idle)
    return ModelInstance(description, runner, memory, prefault)


@dataclass(frozen=True, slots=True)
class _Computation:
    """How a decoder is computed. `native` describes one that Quire's own code computes; None: transformers' modules do.
    `arithmetic` names what the bits of its results depend on, in deterministic mode.
    """

    native: ModelDescription | None
    dtype: torch.dtype
    kernels: Kernels
    cache_dtype: torch.dtype
    arithmetic: str
    quantization: Quantization | None
    """Of a GPU."""


def _choose_computation(
    settings: WorkerSettings, directory: Path, device: torch.device, report: Callable[[str], None]
) -> _Computation:
    """Chooses before the weights are loaded, which takes minutes for a large model. Raises StartupFailed."""
    description = description_of(directory)
    dtype = choose_decoder_dtype(settings, description, device)
    if description is not None:
        limit = context_length_of(settings.max_model_len, description.context_length)
        description = replace(description, context_length=limit)
    kernels = choose_kernels(settings, description, dtype, device, report)
    if not isinstance(kernels, CompiledKernels):  # they could not be compiled, if they were expected
        dtype = choose_dtype(settings.dtype, device)
    check_attention_backend(settings.attention_backend, device)
    native = choose_native(description, kernels, report)
    arithmetic = arithmetic_name(settings, kernels, native, device) if settings.deterministic else ""
    cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, kernel_name(kernels), dtype, device)
    in_8_bits = cache_dtype if cache_dtype.itemsize == 1 else None
    sizes = read_header_sizes(directory) if native is None else read_decoder_sizes(directory, native, dtype)
    check_fits(settings, sizes, kernel_name(kernels), description, device, dtype, in_8_bits)
    return _Computation(
        native,
        dtype,
        kernels,
        cache_dtype,
        arithmetic,
        quantization_of_device(settings.quantization) if kernels is AttentionKind.TRITON else None,
    )


def _measure_limits(
    settings: WorkerSettings, model: LoadedModel, device: torch.device, shape: CacheShape, *, has_drafter: bool
) -> WorkerLimits:
    """The limits, with as many blocks as memory allows. Raises OutOfMemory."""
    usual_step_tokens, most_step_tokens, default_sequences = _BUDGETS[device.type]
    limits = WorkerLimits(
        vocab_size=model.layout.vocab_size,
        context_length=context_length_of(settings.max_model_len, model.layout.context_length),
        block_size=settings.block_size,
        num_blocks=0,
        max_step_tokens=settings.max_step_tokens or most_step_tokens,
        max_sequences=settings.max_sequences or default_sequences,
        max_draft_tokens=settings.max_draft_tokens if has_drafter else 0,
        usual_step_tokens=settings.max_step_tokens or usual_step_tokens,
    )
    may_grow = settings.max_sequences is None and device.type == "cpu"
    largest = replace(limits, max_sequences=_MOST_SEQUENCES) if may_grow else limits
    limits = replace(limits, num_blocks=_num_blocks(settings, model, device, shape, largest))
    if may_grow:
        limits = replace(limits, max_sequences=_sequences_of(limits))
    num_host_blocks = count_host_blocks(
        shape.block_bytes, limits.num_blocks, settings.swap_space, device, settings.memory_limit_bytes
    )
    return replace(limits, num_host_blocks=num_host_blocks)


def release_device(device: str) -> None:
    """Gives memory of models that were dropped back to a GPU's driver; not that of a device that was lost."""
    if torch.device(device).type == "cuda":
        gc.collect()  # captured graphs and their executor refer to each other
        with suppress(torch.AcceleratorError):
            torch.cuda.empty_cache()


def check_vocabulary(tokenizer: Path, vocab_size: int, setting: str) -> None:
    """Raises StartupFailed, naming the setting, if a tokenizer that is not the model's own has ids that the model
    lacks.
    """
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json"
    with tokenizer_errors(lambda error: StartupFailed(f"{setting}: {file} cannot be used: {error}")):
        token_ids = Tokenizer.from_file(str(file)).get_vocab().values()
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise StartupFailed(
            f"{setting}: {tokenizer} has token ids up to {highest}, but the model's vocabulary has {vocab_size}"
        )


def _sequences_of(limits: WorkerLimits) -> int:
    """How many sequences a step may hold with so many blocks, on a CPU: at least those of the limits."""
    wanted = limits.num_blocks * limits.block_size // _TOKENS_OF_SEQUENCE
    return max(limits.max_sequences, min(wanted, _MOST_SEQUENCES))


def _load_grammar_tokenizer(served: ServedModel, vocab_size: int) -> "LLTokenizer":
    """The vocabulary of grammars for logits of this size. Raises UnsupportedTokenizer."""
    try:
        eos_token_ids = eos_token_ids_of(served.path)
        text = (served.tokenizer_path / "tokenizer.json").read_text()
    except (DamagedModelFile, OSError, ValueError) as error:
        raise UnsupportedTokenizer(f"the tokenizer's files cannot be read: {error}") from error
    return load_grammar_tokenizer(text, eos_token_ids, vocab_size)


def _make_runner(
    model: LoadedModel,
    cache: KVCache,
    host_blocks: Tensor,
    limits: WorkerLimits,
    graphs: CudaGraphOptions,
    swap_rate: float | None = None,
    make_drafter: DrafterFactory | None = None,
    grammars: GrammarCompiler | None = None,
) -> Runner:
    if cache.device.type == "cuda" and limits.num_host_blocks:
        from worker_svc.gpu.staging import pin

        try:
            pin(host_blocks)
        except RuntimeError as error:
            raise OutOfMemory(
                f"QUIRE_SWAP_SPACE: {host_blocks.nbytes} bytes of host memory cannot be pinned: {error}"
            ) from error
    executor = model.executor(cache, limits, graphs)
    block_copier = make_block_copier(executor, cache, host_blocks, RateLimiter(swap_rate))
    return Runner(executor, limits, block_copier, make_drafter, grammars)


def _num_blocks(
    settings: WorkerSettings, model: LoadedModel, device: torch.device, shape: CacheShape, limits: WorkerLimits
) -> int:
    if settings.num_blocks is not None:
        check_num_blocks(settings.num_blocks, shape.block_bytes, device, settings.memory_limit_bytes)
        return settings.num_blocks
    budget = MemoryBudget(
        settings.memory_fraction,
        settings.cpu_kv_bytes,
        settings.memory_limit_bytes,
        has_usual_steps=settings.max_step_tokens is None and settings.max_sequences is None,
    )

    def make_runner(needed: WorkerLimits) -> Runner:
        cache = shape.allocate(needed.num_blocks, device)
        graphs = CudaGraphOptions(settings.cuda_graphs)
        host_blocks = shape.allocate_host(needed.num_host_blocks)
        return _make_runner(model, cache, host_blocks, needed, graphs, make_drafter=RepeatingDrafter)

    def profile() -> Runner:
        return run_largest_step(limits, make_runner, device.type)

    num_blocks = count_blocks(shape.block_bytes, budget, device, profile)
    if num_blocks == 0:
        other = "raise QUIRE_CPU_KV_BYTES" if device.type == "cpu" else "lower QUIRE_MAX_STEP_TOKENS"
        raise OutOfMemory(
            f"no memory is left for a KV block of {shape.block_bytes} bytes: raise QUIRE_MEMORY_FRACTION, {other}, "
            "or use a smaller model"
        )
    return num_blocks


def _capture_reporter(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Reports captured graphs in a few lines."""

    def report_capture(captured: int, of: int) -> None:
        if captured % 8 == 0 or captured == of:
            report(f"captured {captured} of {of} graphs")

    return report_capture
