"""A described model by compiled code on a CPU: one call computes all layers of a step."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.decoder import DecoderStepArgs
from quire_kernels.cpu.linear import MatrixFormat
from quire_kernels.cpu.sample import top_logprobs
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.attention import CompiledKernels
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.model.building import build
from worker_svc.model.compiled_body import COMPUTED, CompiledBody, token_args
from worker_svc.model.compiled_builder import CompiledBuilder, can_bound_head
from worker_svc.model.description import ModelDescription
from worker_svc.model.support import check_computed
from worker_svc.model.weights import Checkpoint, ReadMeter, open_checkpoint
from worker_svc.model_layout import ModelLayout


class CompiledModel:
    """A model's weights in the layout of the compiled code."""

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        thread_pool: ThreadPool,
        weights: MatrixFormat = MatrixFormat.PLAIN,
    ) -> None:
        """`weights`: the format of layers that name none.

        Raises UnsupportedModel if the description is not supported, or tensors do not match it.
        """
        check_computed("the compiled kernels", description, COMPUTED)
        builder = CompiledBuilder(thread_pool, checkpoint.dtype, weights, bounds_head=can_bound_head(description))
        self.built = build(description, checkpoint, builder)
        self.body = CompiledBody(description, self.built, builder)

    @property
    def layout(self) -> ModelLayout:
        return self.body.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = self.over(cache)
        thread_pool = self.body.thread_pool
        sampler = CompiledSampler(thread_pool, forward.argmax)
        return HostThreadExecutor(forward, sampler, partial(top_logprobs, thread_pool), forward_finds_argmax=True)

    def over(self, cache: KVCache) -> "CompiledForward":
        """The model over a cache. Raises UnsupportedModel if the kernels do not support one of this shape."""
        return CompiledForward(self, cache)


def load_compiled_model(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    kernels: CompiledKernels,
    meter: ReadMeter | None = None,
) -> CompiledModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    cpu = torch.device("cpu")
    with open_checkpoint(directory, dtype, cpu, meter) as checkpoint:
        return CompiledModel(description, checkpoint, kernels.thread_pool, kernels.weights)


class CompiledForward:
    """A `Forward`: the compiled model over its cache."""

    def __init__(self, model: CompiledModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache  # whose addresses the decoder has
        self._decoder = model.body.over(cache, model.built.head)
        self._vocab_size = model.body.description.vocab_size
        self._logits = torch.empty(0, self._vocab_size)
        self._argmax: NDArray[np.int64] = np.empty(0, np.int64)

    def __call__(self, batch: Batch) -> Tensor:
        logits = self._logits_of(len(batch.logits_indices))
        self._argmax = np.empty(len(logits), np.int64)
        self._decoder(
            DecoderStepArgs(
                *token_args(batch),
                num_samples=len(logits),
                logits_indices=batch.logits_indices.ctypes.data,
                logits=logits.data_ptr(),
                logits_stride=logits.shape[1],
                needs_logits=None if batch.needs_logits is None else batch.needs_logits.ctypes.data,
                argmax=self._argmax.ctypes.data,
            )
        )
        return logits

    def argmax(self, logits: Tensor) -> NDArray[np.int64]:
        """As `quire_kernels.cpu.sample.argmax`, for the logits returned last; the forward pass computed it."""
        if logits.data_ptr() != self._logits.data_ptr() or len(logits) != len(self._argmax):
            raise ValueError("logits: must be those that the last forward pass returned")
        return self._argmax

    def _logits_of(self, num_samples: int) -> Tensor:
        if len(self._logits) < num_samples:
            # Fresh memory of that size would be page-faulted in for each step.
            self._logits = torch.empty(num_samples, self._vocab_size)
        return self._logits[:num_samples]
