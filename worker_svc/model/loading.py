"""Loads a model: by one of Quire's backends if it supports the description, otherwise by transformers' own modules."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from worker_svc.attention import AttentionKind, CompiledKernels, Kernels
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.errors import UnsupportedModel
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.gpu.device_attention import DEFAULT_BACKEND
from worker_svc.model import compiled_body, torch_model
from worker_svc.model.adapters import refuse_adapters
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import COMPUTED as COMPUTED_ON_DEVICE
from worker_svc.model.device_formats import Quantization
from worker_svc.model.support import is_native_alone, unsupported_reason
from worker_svc.model.torch_model import load_torch_model
from worker_svc.model.weight_format import format_of, quantization_of
from worker_svc.model.weights import ReadMeter
from worker_svc.model_layout import ModelLayout

log = logging.getLogger("quire.worker")


class LoadedModel(Protocol):
    """A model's weights on their device, to be used with a cache."""

    @property
    def layout(self) -> ModelLayout:
        """The basis of the cache and of the worker's limits."""

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """The executor over a cache of its layout."""


def unsupported_natively(description: ModelDescription, kernels: Kernels) -> str | None:
    """What of a description the backend of these kernels does not support; None: it supports all of it."""
    if isinstance(kernels, CompiledKernels):
        computed = compiled_body.COMPUTED
    elif kernels is AttentionKind.TRITON:
        computed = COMPUTED_ON_DEVICE
    else:
        computed = torch_model.COMPUTED
    return unsupported_reason(description, computed)


def _of_kv_cache(quantization: Mapping[str, Any] | None) -> list[str]:
    """The fields of a `quantization_config` that say how keys and values are quantized."""
    if quantization is None:
        return []
    inner = quantization.get("quantization")  # as ModelOpt nests them
    fields = {**quantization, **(inner if isinstance(inner, dict) else {})}
    return [name for name in ("kv_cache_scheme", "kv_cache_quant_algo") if fields.get(name) is not None]


def load(
    directory: Path,
    description: ModelDescription | None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    deterministic: bool = False,
    attention_backend: str = DEFAULT_BACKEND,
    quantization: Quantization | None = None,
    meter: ReadMeter | None = None,
) -> LoadedModel:
    """Loads the model of a directory; `description` is its description, or None.

    Raises UnsupportedModel, which says why it cannot be served.

    With `deterministic`, a GPU computes a native model so that a token's bits do not depend on other tokens. Compiled
    kernels always do; nothing else can. `attention_backend` computes the attention on a GPU, and `quantization` is the
    format of a native model's weights there. `meter` shows what has been read of a native model.
    """
    if quantization is not None and kernels is not AttentionKind.TRITON:
        raise ValueError("quantization: must be None where the kernels are not Triton's")
    # Unsupported formats and adapters are reported before anything else.
    format_of(directory)
    refuse_adapters(directory)
    stored = quantization_of(directory)
    for name in _of_kv_cache(stored):
        log.info("the model's %s is not used: QUIRE_KV_CACHE_DTYPE says how the KV cache is stored", name)
    unsupported = None if description is None else unsupported_natively(description, kernels)
    if description is None or unsupported is not None:
        if description is not None and is_native_alone(description):
            raise UnsupportedModel(
                f"the {description.architecture} model in {directory} has latent attention, which transformers' "
                f"modules do not compute over a paged cache, and Quire's kernels do not compute {unsupported}"
            )
        if stored is not None:
            raise UnsupportedModel(
                f"the model in {directory} has quantized weights, which transformers' modules do not read: only models "
                "that are computed natively may have them"
            )
        # Its modules take seconds to import.
        from worker_svc.model.transformers_model import load_transformers_model

        return load_transformers_model(read_config(directory), directory, dtype, device, kernels, attention_backend)
    if isinstance(kernels, CompiledKernels):
        return load_compiled_model(description, directory, dtype, kernels, meter)
    if kernels is AttentionKind.TRITON:
        from worker_svc.model.triton_model import load_triton_model

        return load_triton_model(
            description,
            directory,
            dtype,
            device,
            deterministic=deterministic,
            attention_backend=attention_backend,
            quantization=quantization,
            meter=meter,
        )
    return load_torch_model(description, directory, dtype, meter)
