"""From a model's directory to what runs it: for the Llama family our own modules, else those of transformers."""

from pathlib import Path
from typing import Protocol

import torch

from worker_svc.attention import AttentionKind, CompiledKernels, Kernels, make_attention
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor, HostExecutor
from worker_svc.forward import EagerForward
from worker_svc.model.compiled import load_compiled
from worker_svc.model.config import ModelConfig, read_config
from worker_svc.model.layout import ModelLayout
from worker_svc.model.llama import LlamaModel, load_model


class LoadedModel(Protocol):
    """A model's weights, on their device, to be put over a cache."""

    @property
    def layout(self) -> ModelLayout:
        """What the cache and the limits of a worker follow from."""

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """What computes steps over a cache of its layout."""


class NativeModel:
    """A model of the Llama family, by our own modules."""

    def __init__(self, model: LlamaModel, kind: AttentionKind) -> None:
        self._model, self._kind = model, kind
        self.layout = model.config.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """As `LoadedModel` has it."""
        return HostExecutor(EagerForward(self._model, make_attention(self._kind, cache, self.layout.layers)))


def load(
    directory: Path,
    native: ModelConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    deterministic: bool = False,
) -> LoadedModel:
    """The model of a directory; `native` is its config where our own modules compute it.

    Raises UnsupportedModel, which says why it cannot be served.

    With `deterministic`, a GPU computes a native model so that no token has a say in another's bits. Compiled kernels
    always do; nothing else can.
    """
    if native is None:
        # Its modules take seconds to import.
        from worker_svc.model.transformers_model import load_transformers_model

        return load_transformers_model(read_config(directory), directory, dtype, device, kernels)
    if isinstance(kernels, CompiledKernels):
        return load_compiled(native, directory, dtype, kernels)
    if device.type == "cuda":
        # Triton is for those who ask for it.
        from worker_svc.model.triton_llama import load_triton_llama

        return load_triton_llama(native, directory, dtype, device, deterministic=deterministic)
    return NativeModel(load_model(native, directory, dtype, device), kernels)
