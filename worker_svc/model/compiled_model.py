"""A described model by compiled code on a CPU: one call computes all layers of a step."""

from ctypes import byref
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.attention import RuleArgs, SequencesArgs, check_compiled_support
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.linear import PANEL, PackedMatrix, pack_matrix
from quire_kernels.cpu.llama import LayerArgs, ModelArgs, StepArgs
from quire_kernels.cpu.sample import top_logprobs
from quire_kernels.cpu.thread_pool import ThreadPool, type_of
from worker_svc.attention import CompiledKernels
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.model.building import BuiltLayer, build
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.description import ComputedFormat, LinearLayer, LinearRole, ModelDescription, Norm
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import inverse_frequencies, rope_of
from worker_svc.model.support import Feature, check_computed
from worker_svc.model.weight_format import StoredWeight, format_of
from worker_svc.model.weights import Checkpoint
from worker_svc.model_layout import ModelLayout

COMPUTED = frozenset({Feature.SOFT_CAP, Feature.INT8_WEIGHTS})

# What a panel takes of gate and of up.
_LANES = PANEL // 2


class _CompiledBuilder:
    """Lays weights out for the compiled code while they are read."""

    def __init__(self, thread_pool: ThreadPool, dtype: torch.dtype, default: ComputedFormat) -> None:
        self.vectors: list[Tensor] = []
        """Keeps the tensors alive whose addresses `norm` returns."""
        self._thread_pool, self._dtype, self._default = thread_pool, dtype, default
        self._memory = LargePages()

    def linear(self, weights: LinearWeights) -> PackedMatrix:
        layer = weights.layer
        weight, bias = self._gate_up(weights) if layer.role is LinearRole.GATE_UP else weights.fused()
        return self._pack(layer, weight, bias)

    def norm(self, norm: Norm, weight: Tensor) -> int:
        vector = weight.float().contiguous()
        self.vectors.append(vector)
        return vector.data_ptr()

    def head(self, layer: LinearLayer, weight: Tensor) -> PackedMatrix:
        return self._pack(layer, weight)

    def _pack(self, layer: LinearLayer, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
        int8 = (layer.computed or self._default) is ComputedFormat.INT8
        return pack_matrix(self._thread_pool, weight, bias, int8=int8, memory=self._memory)

    def _gate_up(self, weights: LinearWeights) -> tuple[Tensor, Tensor | None]:
        """Sixteen outputs of the gate, then the same of up, and so on, padded with zeros."""
        width = weights.outputs[0]
        num_panels = -(-width // _LANES)
        both = torch.zeros(num_panels, 2, _LANES, weights.inputs, dtype=self._dtype)
        biases = torch.zeros(num_panels, 2, _LANES, dtype=self._dtype) if weights.biased else None

        def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
            _copy_by_panels(weight.dense(), both[:, part])
            if biases is not None and bias is not None:
                _copy_by_panels(bias, biases[:, part])

        weights.for_each_part(place)
        return both.flatten(0, 2), None if biases is None else biases.flatten()


class CompiledModel:
    """A model's weights in the layout of the compiled code."""

    def __init__(
        self, description: ModelDescription, checkpoint: Checkpoint, thread_pool: ThreadPool, *, int8: bool = False
    ) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("the compiled kernels", description, COMPUTED)
        self.description = description
        self.thread_pool = thread_pool
        self.rope = rope_of(description)
        self.frequencies = inverse_frequencies(self.rope, self.layout.head_dim)
        builder = _CompiledBuilder(thread_pool, checkpoint.dtype, ComputedFormat.INT8 if int8 else ComputedFormat.MODEL)
        self._built = build(description, checkpoint, builder)
        self._vectors = builder.vectors
        self._layers = (LayerArgs * len(description.layers))(*map(_layer_args, self._built.layers))

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = self.over(cache.values)
        sampler = CompiledSampler(self.thread_pool, forward.argmax)
        return HostThreadExecutor(forward, sampler, partial(top_logprobs, self.thread_pool))

    def over(self, cache: Tensor) -> "CompiledForward":
        """The model over a cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

        Raises UnsupportedModel if the kernels do not support a cache of this shape.
        """
        description, first = self.description, self.description.layers[0]
        attention = first.attention
        refused = check_compiled_support(attention.head_dim, cache.shape[4], cache.dtype)
        if refused is not None:
            raise UnsupportedModel(f"the compiled kernels cannot be used: {refused}")
        arguments = ModelArgs(
            description.hidden_size,
            first.mlp.width,
            len(description.layers),
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            description.norm.eps,
            self._layers,
            self._built.norm,
            self._built.head.args(),
            self._built.embedding.data_ptr(),
            cache.data_ptr(),
            cache.shape[4],
            self.frequencies.data_ptr(),
            self.rope.attention_factor,
        )
        return CompiledForward(self, cache, arguments)


def load_compiled_model(
    description: ModelDescription, directory: Path, dtype: torch.dtype, kernels: CompiledKernels
) -> CompiledModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    cpu = torch.device("cpu")
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, cpu) as checkpoint:
        model = CompiledModel(description, checkpoint, kernels.thread_pool, int8=kernels.int8)
        checkpoint.check_all_taken()
        return model


class CompiledForward:
    """A `Forward`: the compiled model over its cache."""

    def __init__(self, model: CompiledModel, cache: Tensor, arguments: ModelArgs) -> None:
        self._model, self._cache = model, cache
        self._logits = torch.empty(0, model.description.vocab_size)
        self._argmax: NDArray[np.int64] = np.empty(0, np.int64)
        self._library = model.thread_pool.library
        # The pool's threads compute. torch's own threads would spin and compete with them.
        torch.set_num_threads(1)
        self._handle: int | None = self._library.quire_llama_new(
            model.thread_pool.handle, type_of(cache.dtype), byref(arguments)
        )

    def __call__(self, batch: Batch) -> Tensor:
        logits = self._logits_of(len(batch.logits_indices))
        self._argmax = np.empty(len(logits), np.int64)
        step = StepArgs(
            len(batch.token_ids),
            batch.token_ids.ctypes.data,
            batch.slots.ctypes.data,
            batch.positions.ctypes.data,
            SequencesArgs(
                len(batch.context_lens),
                batch.block_tables.shape[1],
                batch.block_tables.ctypes.data,
                batch.query_starts.ctypes.data,
                batch.context_lens.ctypes.data,
            ),
            len(batch.logits_indices),
            batch.logits_indices.ctypes.data,
            logits.data_ptr(),
            logits.shape[1],
            self._argmax.ctypes.data,
        )
        self._library.quire_llama_run(self._handle, byref(step))
        return logits

    def argmax(self, logits: Tensor) -> NDArray[np.int64]:
        """As `quire_kernels.cpu.sample.argmax`, for the logits returned last; the forward pass computed it."""
        if logits.data_ptr() != self._logits.data_ptr() or len(logits) != len(self._argmax):
            raise ValueError("logits: must be those that the last forward pass returned")
        return self._argmax

    def _logits_of(self, num_samples: int) -> Tensor:
        if len(self._logits) < num_samples:
            # Fresh memory of that size would be page-faulted in for each step.
            self._logits = torch.empty(num_samples, self._model.description.vocab_size)
        return self._logits[:num_samples]

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.quire_llama_delete(self._handle)
            self._handle = None


def _layer_args(layer: BuiltLayer[PackedMatrix, int]) -> LayerArgs:
    attention = layer.spec.attention
    return LayerArgs(
        layer.attention_norm,
        layer.query_norm,
        layer.key_norm,
        layer.mlp_norm,
        layer.qkv.args(),
        layer.output.args(),
        layer.gate_up.args(),
        layer.down.args(),
        RuleArgs(attention.scale, attention.soft_cap or 0.0, attention.window or 0),
    )


def _copy_by_panels(part: Tensor, panels: Tensor) -> None:
    """Rows [width, ...] into [num_panels, lanes, ...], the last of which may not be full."""
    num_full = len(part) // _LANES
    panels[:num_full].copy_(part[: num_full * _LANES].view(num_full, _LANES, *part.shape[1:]))
    rest = part[num_full * _LANES :]
    if len(rest):
        panels[num_full, : len(rest)].copy_(rest)
