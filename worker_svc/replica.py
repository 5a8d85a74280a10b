"""Loads a model, sizes its cache and warms it up: from settings to a runner that is ready for steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire_kernels.cpu.library import CannotBuild, load_library
from quire_kernels.cpu.team import Team
from svc_common.models import cache_root, resolve_model, tokenizer_fingerprint
from worker_svc.attention import AttentionKind, make_attention
from worker_svc.errors import CannotServe
from worker_svc.fingerprint import model_fingerprint
from worker_svc.forward import EagerForward, Forward
from worker_svc.host import available_cpus, has_bfloat16
from worker_svc.identity import Identity, Limits
from worker_svc.memory import CacheShape, MemoryBudget, OutOfMemory, count_blocks
from worker_svc.model.compiled import CompiledKernels, load_compiled, why_not_compiled
from worker_svc.model.config import ModelConfig, read_model_config
from worker_svc.model.llama import load_model
from worker_svc.progress import progress
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

# Tokens and sequences of a step. On 2 cores, chunks of 256 tokens instead of 512 cost 8 % of throughput and shorten
# the gaps between a stream's tokens by a third at p99. A GPU needs more to be busy.
_BUDGETS = {"cpu": (512, 64), "cuda": (2048, 256)}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# A loaded model, to be put over its cache.
OverCache = Callable[[Tensor], Forward]


class NoSuchDevice(CannotServe):
    """The device that the settings ask for is not there. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A loaded model, warm. The runner is for one thread."""

    identity: Identity
    runner: Runner


def load_replica(settings: WorkerSettings, report: Callable[[str], None]) -> Replica:
    """Load what the settings name, in seconds to minutes; `report` is told what takes long, on another thread.

    Raises ModelNotFound, UnsupportedModel, NoSuchDevice or OutOfMemory, with a text for the operator.
    """
    served = resolve_model(settings.model)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device)
    torch.set_num_threads(settings.num_threads or available_cpus())
    config = read_model_config(served.path)
    kernels = _kernels(settings, config, dtype, device, report)
    with progress(f"loading {served.name}", report):
        model = _load(served.path, config, dtype, device, kernels)
    default_step_tokens, default_sequences = _BUDGETS[device.type]
    shape = CacheShape.of(config, settings.block_size, dtype)
    limits = Limits(
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        block_size=settings.block_size,
        num_blocks=0,
        max_step_tokens=settings.max_step_tokens or default_step_tokens,
        max_sequences=settings.max_sequences or default_sequences,
    )
    with progress("measuring memory", report):
        limits = replace(limits, num_blocks=_num_blocks(settings, model, device, shape, limits))
    runner = _make_runner(model, device, shape, limits)
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
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> AttentionKind | CompiledKernels:
    """What computes, as the settings want it or as suits the device best."""
    choice, int8 = settings.kernels, settings.quantization == "int8"
    on_gpu = device.type == "cuda"
    if on_gpu and (choice in ("torch", "compiled") or int8):
        what = "QUIRE_QUANTIZATION is int8" if int8 else f"QUIRE_KERNELS is {choice}"
        raise NoSuchDevice(f"{what}, which is for processors, and the device is a GPU")
    if on_gpu or choice == "triton":
        return AttentionKind.TRITON
    if choice == "torch" and not int8:
        return AttentionKind.TORCH
    why_not = why_not_compiled(config, settings.block_size, dtype)
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


def _load(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: AttentionKind | CompiledKernels,
) -> OverCache:
    if isinstance(kernels, CompiledKernels):
        return load_compiled(config, directory, dtype, kernels).over
    model = load_model(config, directory, dtype, device)
    return lambda cache: EagerForward(model, make_attention(kernels, cache, config.attention_scale))


def _make_runner(model: OverCache, device: torch.device, shape: CacheShape, limits: Limits) -> Runner:
    return Runner(model(shape.allocate(limits.num_blocks, device)), limits)


def _num_blocks(
    settings: WorkerSettings, model: OverCache, device: torch.device, shape: CacheShape, limits: Limits
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    budget = MemoryBudget(settings.memory_fraction, settings.cpu_kv_bytes)

    def profile() -> None:
        step = _largest_step(limits)
        needed = sum(len(scheduled.new_block_ids) for scheduled in step.scheduled)
        _run(_make_runner(model, device, shape, replace(limits, num_blocks=needed)), step)

    num_blocks = count_blocks(shape.block_bytes, budget, device, profile)
    if num_blocks == 0:
        raise OutOfMemory("no memory is left for keys and values: choose a smaller model, or smaller budgets")
    return num_blocks


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
    """Compile and load what the first steps need: one with a prompt, one with a draw after it."""
    limits = runner.limits
    length = min(limits.max_step_tokens, limits.context_length - 2, limits.num_blocks * limits.block_size - 1)
    _run(runner, _prefill([length], limits.block_size))
    _run(runner, Step([], [], [ScheduledSequence(0, length, 1, [])]))
    runner.reset()


def _run(runner: Runner, step: Step) -> None:
    for result in runner.step(step).sequences:
        if result.failure is not None:
            raise RuntimeError(f"a step of the worker's own failed: {result.failure}")
