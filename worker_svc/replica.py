"""Loads a model, sizes its cache and warms it up: from settings to a runner that is ready for steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire_kernels.cpu.attention import why_not_compiled
from quire_kernels.cpu.library import CannotBuild, load_library
from quire_kernels.cpu.team import Team
from svc_common.models import cache_root, resolve_model, tokenizer_fingerprint
from worker_svc.attention import AttentionKind, CompiledKernels, Kernels
from worker_svc.errors import CannotServe
from worker_svc.executor import Graphs
from worker_svc.fingerprint import model_fingerprint
from worker_svc.host import available_cpus, has_bfloat16
from worker_svc.identity import Identity, Limits
from worker_svc.memory import CacheShape, MemoryBudget, OutOfMemory, count_blocks
from worker_svc.model.config import ModelConfig, native_config, read_config
from worker_svc.model.loading import LoadedModel, load
from worker_svc.progress import progress
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

# Tokens and sequences of a step. On 2 cores a prompt's tokens are computed fastest, and the streams beside it wait
# least, in chunks of 256. A GPU needs more to be busy.
_BUDGETS = {"cpu": (256, 64), "cuda": (2048, 256)}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NoSuchDevice(CannotServe):
    """The device that the settings ask for is not there. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A loaded model, warm. The runner is for one thread."""

    identity: Identity
    runner: Runner


def load_replica(settings: WorkerSettings, report: Callable[[str], None]) -> Replica:
    """Load what the settings name, in seconds to minutes; `report` is told what takes long, on another thread.

    Raises ModelNotFound, or CannotServe as UnsupportedModel, NoSuchDevice, OutOfMemory and itself: with a text for the
    operator.
    """
    served = resolve_model(settings.model)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    native = native_config(read_config(served.path))
    kernels = _kernels(settings, native, dtype, device, report)
    with progress(f"loading {served.name}", report):
        model = load(served.path, dtype, device, kernels)
    if native is None and isinstance(kernels, CompiledKernels):
        why_not = why_not_compiled(model.layout.head_dim, settings.block_size, dtype)
        if why_not is not None and settings.kernels == "compiled":
            raise CannotServe(f"the compiled kernels cannot be used: {why_not}")
        if why_not is not None:
            report(f"torch computes the attention, which is slower than compiled kernels: {why_not}")
    default_step_tokens, default_sequences = _BUDGETS[device.type]
    shape = CacheShape.of(model.layout, settings.block_size, dtype)
    limits = Limits(
        vocab_size=model.layout.vocab_size,
        context_length=model.layout.context_length,
        block_size=settings.block_size,
        num_blocks=0,
        max_step_tokens=settings.max_step_tokens or default_step_tokens,
        max_sequences=settings.max_sequences or default_sequences,
    )
    with progress("measuring memory", report):
        limits = replace(limits, num_blocks=_num_blocks(settings, model, device, shape, limits))
    runner = _make_runner(model, device, shape, limits, Graphs(settings.cuda_graphs, _told(report)))
    with progress("warming up", report):
        _warm_up(runner)
    identity = Identity(
        model=served.name,
        fingerprint=model_fingerprint(served.path, dtype, settings.quantization),
        tokenizer_fingerprint=tokenizer_fingerprint(served.path),
        block_bytes=shape.block_bytes,
        limits=limits,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )
    return Replica(identity, runner)


def _device(choice: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if choice == "cuda" and not has_gpu:
        raise NoSuchDevice("QUIRE_DEVICE is cuda, and torch finds no GPU")
    return torch.device("cuda", 0) if has_gpu and choice != "cpu" else torch.device("cpu")


def _dtype(choice: str, device: torch.device) -> torch.dtype:
    if choice != "auto":
        return _DTYPES[choice]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_bfloat16() else torch.float32


def _kernels(
    settings: WorkerSettings,
    native: ModelConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> Kernels:
    """What computes, as the settings want it or as suits the device best."""
    choice, int8 = settings.kernels, settings.quantization == "int8"
    on_gpu = device.type == "cuda"
    if int8 and choice in ("torch", "triton"):
        raise CannotServe(f"QUIRE_QUANTIZATION is int8, which compiled kernels compute, and QUIRE_KERNELS is {choice}")
    if on_gpu and (choice in ("torch", "compiled") or int8):
        what = "QUIRE_QUANTIZATION is int8" if int8 else f"QUIRE_KERNELS is {choice}"
        raise NoSuchDevice(f"{what}, which is for processors, and the device is a GPU")
    if on_gpu or choice == "triton":
        return AttentionKind.TRITON
    if choice == "torch":
        return AttentionKind.TORCH
    if native is not None:
        why_not = why_not_compiled(native.head_dim, settings.block_size, dtype)
    else:
        # Of other models they compute the attention, if its shape lets them: that is known once the model is loaded.
        why_not = "of the model, only those of the Llama family take weights in 8 bits" if int8 else None
    if why_not is None:
        try:
            library = load_library(cache_root() / "kernels", report)
        except CannotBuild as error:
            why_not = str(error)
        else:
            return CompiledKernels(Team(library, torch.get_num_threads()), int8)
    if choice == "compiled" or int8:
        raise CannotServe(f"the compiled kernels cannot be used: {why_not}")
    report(f"torch computes, which is slower than compiled kernels: {why_not}")
    return AttentionKind.TORCH


def _make_runner(model: LoadedModel, device: torch.device, shape: CacheShape, limits: Limits, graphs: Graphs) -> Runner:
    return Runner(model.executor(shape.allocate(limits.num_blocks, device), limits, graphs), limits)


def _num_blocks(
    settings: WorkerSettings, model: LoadedModel, device: torch.device, shape: CacheShape, limits: Limits
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    budget = MemoryBudget(settings.memory_fraction, settings.cpu_kv_bytes)

    def profile() -> Runner:
        step = _largest_step(limits)
        needed = sum(len(scheduled.new_block_ids) for scheduled in step.scheduled)
        runner = _make_runner(model, device, shape, replace(limits, num_blocks=needed), Graphs(settings.cuda_graphs))
        _run(runner, step)
        return runner

    num_blocks = count_blocks(shape.block_bytes, budget, device, profile)
    if num_blocks == 0:
        raise OutOfMemory("no memory is left for keys and values: choose a smaller model, or smaller budgets")
    return num_blocks


def _told(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Tells of graphs that are captured, a few lines in all."""

    def tell(captured: int, of: int) -> None:
        if captured % 8 == 0 or captured == of:
            report(f"captured {captured} of {of} graphs")

    return tell


def _largest_step(limits: Limits) -> Step:
    """All tokens and all sequences that a step may hold, each with a draw of the costliest kind."""
    num_sequences = min(limits.max_sequences, limits.max_step_tokens)
    share, more = divmod(limits.max_step_tokens, num_sequences)
    lengths = [min(share + (row < more), limits.context_length - 1) for row in range(num_sequences)]
    return _prefill(lengths, limits.block_size)


def _prefill(lengths: list[int], block_size: int) -> Step:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=1000, repetition_penalty=1.1, logprobs=20)
    new, scheduled, next_block = [], [], 0
    for sequence_id, length in enumerate(lengths):
        blocks = list(range(next_block, next_block + length // block_size + 1))
        next_block += len(blocks)
        new.append(NewSequence(sequence_id, [0] * length, length, 0, params))
        scheduled.append(ScheduledSequence(sequence_id, 0, length, blocks))
    return Step([], new, scheduled)


def _warm_up(runner: Runner) -> None:
    """Compile and load what the first steps need: one with a prompt, one with a draw after it, and so for more of them.

    Triton compiles a kernel anew where a size is 1 or becomes a multiple of 16.
    """
    limits = runner.limits
    length = min(limits.max_step_tokens, limits.context_length - 2, limits.num_blocks * limits.block_size - 1)
    for num_sequences in sorted({min(count, limits.max_sequences, length) for count in (1, 3, 16, 17)}):
        share = length // num_sequences
        step = _prefill([share] * num_sequences, limits.block_size)
        if sum(len(scheduled.new_block_ids) for scheduled in step.scheduled) > limits.num_blocks:
            break
        _run(runner, step)
        _run(runner, Step([], [], [ScheduledSequence(row, share, 1, []) for row in range(num_sequences)]))
        runner.reset()


def _run(runner: Runner, step: Step) -> None:
    for result in runner.step(step).sequences:
        if result.failure is not None:
            raise RuntimeError(f"a step of the worker's own failed: {result.failure}")
