"""Loads a model: by one of our backends where it computes the description, else by transformers' own modules."""

from pathlib import Path
from typing import Protocol

import torch

from worker_svc.attention import AttentionKind, CompiledKernels, Kernels, make_attention
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor, HostExecutor
from worker_svc.model import compiled, llama
from worker_svc.model.adapters import refuse_adapters
from worker_svc.model.compiled import load_compiled
from worker_svc.model.config import UnsupportedModel, read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.layout import ModelLayout
from worker_svc.model.llama import EagerForward, LlamaModel, load_model
from worker_svc.model.support import unsupported_reason
from worker_svc.model.weight_format import format_of, quantization_of


class LoadedModel(Protocol):
    """A model's weights, on their device, to be put over a cache."""

    @property
    def layout(self) -> ModelLayout:
        """What the cache and the limits of a worker follow from."""

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """What computes steps over a cache of its layout."""


class NativeModel:
    """A model by torch's operators, its attention by torch's or by interpreted Triton kernels."""

    def __init__(self, model: LlamaModel, kind: AttentionKind) -> None:
        self._model, self._kind = model, kind
        self.layout = model.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """As `LoadedModel` has it."""
        return HostExecutor(EagerForward(self._model, make_attention(self._kind, cache, self.layout.layers)))


def unsupported_natively(description: ModelDescription, kernels: Kernels, device: torch.device) -> str | None:
    """What of a description the backend of these kernels does not compute, and transformers must; None: nothing."""
    if isinstance(kernels, CompiledKernels):
        computed = compiled.COMPUTED
    elif device.type == "cuda":
        # Triton is for those who ask for it.
        from worker_svc.model import triton_llama

        computed = triton_llama.COMPUTED
    else:
        computed = llama.COMPUTED
    return unsupported_reason(description, computed)


def load(
    directory: Path,
    description: ModelDescription | None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    deterministic: bool = False,
) -> LoadedModel:
    """The model of a directory; `description` is its own, None where it has none.

    Raises UnsupportedModel, which says why it cannot be served.

    With `deterministic`, a GPU computes a native model so that no token has a say in another's bits. Compiled kernels
    always do; nothing else can.
    """
    # Of formats that are not read, and of adapters, the operator is told before anything else.
    format_of(directory)
    refuse_adapters(directory)
    if description is None or unsupported_natively(description, kernels, device) is not None:
        if quantization_of(directory) is not None:
            raise UnsupportedModel(
                f"the model in {directory} has quantized weights, which transformers' modules do not read: only models "
                "that are computed natively may have them"
            )
        # Its modules take seconds to import.
        from worker_svc.model.transformers_model import load_transformers_model

        return load_transformers_model(read_config(directory), directory, dtype, device, kernels)
    if isinstance(kernels, CompiledKernels):
        return load_compiled(description, directory, dtype, kernels)
    if device.type == "cuda":
        from worker_svc.model.triton_llama import load_triton_llama

        return load_triton_llama(description, directory, dtype, device, deterministic=deterministic)
    return NativeModel(load_model(description, directory, dtype), kernels)
