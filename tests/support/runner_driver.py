"""Drives a runner like a scheduler: scattered blocks, chunked prompts together with decodes, deltas for known
sequences.

As a program it prints what a model generates: `python runner_driver.py MODEL_DIRECTORY KERNELS PROMPTS_AS_JSON
NUM_TOKENS`.
"""

import json
import random
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import compiled
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.attention import AttentionKind, CompiledKernels
from worker_svc.block_copier import RateLimiter
from worker_svc.block_copier_factory import make_block_copier
from worker_svc.cache import CacheShape, KVCache
from worker_svc.description import WorkerLimits
from worker_svc.drafting import DrafterFactory
from worker_svc.executor import CudaGraphOptions
from worker_svc.launched_step import LaunchedStep
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.loading import load
from worker_svc.model_layout import ModelLayout
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, TokenLogprobs

if TYPE_CHECKING:  # it imports llguidance, which `make gpu-check` does without
    from worker_svc.grammar import GrammarCompiler

GREEDY = SamplingParams()


def make_runner(
    directory: Path,
    kernels: str = "torch",
    *,
    weights: MatrixFormat = MatrixFormat.PLAIN,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_blocks: int = 64,
    max_step_tokens: int = 512,
    max_sequences: int = 64,
    device: str = "cpu",
    cuda_graphs: bool = False,
    num_host_blocks: int = 0,
    cache_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    attention_backend: str = "triton",
    description: ModelDescription | None = None,
    native: bool = True,
    make_drafter: DrafterFactory | None = None,
    max_draft_tokens: int = 4,
    grammars: "GrammarCompiler | None" = None,
    quantization: Quantization | None = None,
) -> Runner:
    """A runner of the model in a directory, over a cache that is filled with garbage.

    `kernels` has the values of the setting; "triton" does on a CPU what it does on a GPU. The `description` defaults to
    that of the model's config; without `native`, transformers' own modules compute the model. `weights` is the format
    of those that the compiled kernels multiply, `quantization` that of "triton", whose attention `attention_backend`
    computes.
    `max_draft_tokens` is the limit of a drafter.
    """
    where = torch.device(device)
    described = (description or describe(read_config(directory))) if native else None
    model = _load(directory, described, kernels, weights, dtype, where, deterministic, attention_backend, quantization)
    layout: ModelLayout = model.layout
    shape = CacheShape.of(layout, block_size, cache_dtype or dtype)
    cache, host_blocks = shape.allocate(num_blocks, where), shape.allocate_host(num_host_blocks)
    _fill_with_garbage(cache)
    limits = WorkerLimits(
        layout.vocab_size,
        layout.context_length,
        block_size,
        num_blocks,
        max_step_tokens,
        max_sequences,
        num_host_blocks,
        0 if make_drafter is None else max_draft_tokens,
    )
    executor = model.executor(cache, limits, CudaGraphOptions(cuda_graphs))
    pinned = host_blocks.pin_memory() if device == "cuda" else host_blocks
    return Runner(
        executor, limits, make_block_copier(executor, cache, pinned, RateLimiter(None)), make_drafter, grammars
    )


def _fill_with_garbage(cache: KVCache) -> None:
    generator = torch.Generator(cache.device).manual_seed(0)
    if cache.has_scales:
        cache.blocks.random_(0, 120, generator=generator)
        return
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)


def _load(
    directory: Path,
    description: ModelDescription | None,
    kernels: str,
    weights: MatrixFormat,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    attention_backend: str,
    quantization: Quantization | None,
) -> Any:
    chosen = CompiledKernels(compiled.thread_pool(), weights) if kernels == "compiled" else AttentionKind(kernels)
    return load(
        directory,
        description,
        dtype,
        device,
        chosen,
        deterministic=deterministic,
        attention_backend=attention_backend,
        quantization=quantization,
    )


class Driver:
    """Runs prompts together, `chunk` prompt tokens of each at a time, until each has its tokens.

    `ahead` is the number of steps that are launched before the previous one is finished: 0 or 1.
    """

    def __init__(self, runner: Runner, chunk: int = 512, ahead: int = 0) -> None:
        self._runner = runner
        self._chunk = chunk
        self._ahead = ahead
        self._free = list(range(runner.limits.num_blocks))
        random.Random(0).shuffle(self._free)
        self._next_id = 1
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def generate(
        self, prompts: list[list[int]], num_tokens: int, params: SamplingParams | list[SamplingParams] = GREEDY
    ) -> list[list[int]]:
        """Returns the continuation of each prompt."""
        every = params if isinstance(params, list) else [params] * len(prompts)
        running = [
            _Running(NewSequence(sequence_id, prompt, len(prompt), 0, wanted), num_tokens)
            for sequence_id, (prompt, wanted) in enumerate(zip(prompts, every, strict=True), start=self._next_id)
        ]
        self._next_id += len(running)
        new = [sequence.new for sequence in running]
        sampled: dict[int, list[int]] = {sequence.new.sequence_id: [] for sequence in running}
        launched: deque[LaunchedStep] = deque()
        while True:
            scheduled = [self._schedule(sequence) for sequence in running if sequence.num_due]
            if scheduled:
                launched.append(self._runner.launch(Step([], new, scheduled)))
                new = []
            if not launched:
                break
            if len(launched) > self._ahead or not scheduled:
                for result in self._runner.finish(launched.popleft()).sequences:
                    assert result.failure is None, result.failure
                    sampled[result.sequence_id] += result.token_ids
                    self.logprobs.setdefault(result.sequence_id, []).extend(result.logprobs)
        self._runner.step(Step(list(sampled), [], []))
        self._free += [block for sequence in running for block in sequence.blocks]
        return list(sampled.values())

    def _schedule(self, sequence: "_Running") -> ScheduledSequence:
        start, count = sequence.num_computed, min(self._chunk, sequence.num_known - sequence.num_computed)
        sequence.num_computed += count
        missing = -(-sequence.num_computed // self._runner.limits.block_size) - len(sequence.blocks)
        added = [self._free.pop() for _ in range(missing)]
        sequence.blocks += added
        if sequence.num_computed == sequence.num_known:
            sequence.num_known += 1
            sequence.num_due -= 1
        return ScheduledSequence(sequence.new.sequence_id, start, count, added)


class _Running:
    """The state of a sequence as a scheduler keeps it: known tokens, the last one possibly promised, and computed
    tokens."""

    def __init__(self, new: NewSequence, num_due: int) -> None:
        self.new, self.num_due = new, num_due
        self.num_known, self.num_computed = len(new.token_ids), 0
        self.blocks: list[int] = []


def main() -> None:
    directory, kernels, prompts, num_tokens = sys.argv[1:]
    driver = Driver(make_runner(Path(directory), kernels), chunk=8)
    print(json.dumps(driver.generate(json.loads(prompts), int(num_tokens))))


if __name__ == "__main__":
    main()
