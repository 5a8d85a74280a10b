"""The Llama family by compiled code on a processor: all layers of a step in one call, with no Python between them."""

from ctypes import byref
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.attention import SequencesArgs
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.linear import PANEL, PackedMatrix, pack_matrix
from quire_kernels.cpu.llama import LayerArgs, ModelArgs, StepArgs
from quire_kernels.cpu.thread_pool import ThreadPool, type_of
from worker_svc.attention import CompiledKernels
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.model.config import ModelConfig
from worker_svc.model.layout import ModelLayout
from worker_svc.model.rope import inverse_frequencies
from worker_svc.model.weights import Checkpoint

# What a panel takes of gate and of up.
_LANES = PANEL // 2


class CompiledLlama:
    """A model's weights as the compiled code wants them. They are laid out while they are read."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, thread_pool: ThreadPool, *, int8: bool = False
    ) -> None:
        self.config = config
        self.thread_pool = thread_pool
        self._int8 = int8
        self._keep_alive: list[object] = []
        self._memory = LargePages()
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", *shape).contiguous()
        self.dtype = self._embedding.dtype
        self._layers = (LayerArgs * config.num_layers)(
            *[self._layer(checkpoint, layer) for layer in range(config.num_layers)]
        )
        self._norm = self._vector(checkpoint, "model.norm.weight", config.hidden_size)
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            head = self._embedding
        else:
            head = checkpoint.take("lm_head.weight", *shape)
        self._head = self._pack(head)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)

    @property
    def layout(self) -> ModelLayout:
        """What the cache and the limits of a worker follow from."""
        return self.config.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        """As `LoadedModel` has it."""
        forward = self.over(cache.values)
        return HostThreadExecutor(forward, CompiledSampler(self.thread_pool, forward.argmax))

    def over(self, cache: Tensor) -> "CompiledForward":
        """The model over a cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        config = self.config
        arguments = ModelArgs(
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.attention_scale,
            self._layers,
            self._norm,
            self._head.args(),
            self._embedding.data_ptr(),
            cache.data_ptr(),
            cache.shape[4],
            self.frequencies.data_ptr(),
            config.rope.attention_factor,
        )
        return CompiledForward(self, cache, arguments)

    def _layer(self, checkpoint: Checkpoint, layer: int) -> LayerArgs:
        config = self.config
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, dim = config.hidden_size, config.head_dim
        widths = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        qkv = [
            self._take_linear(checkpoint, f"{attention}{name}_proj", width, hidden, config.qkv_bias)
            for name, width in zip("qkv", widths, strict=True)
        ]
        gate, up = (
            self._take_linear(checkpoint, f"{mlp}{name}_proj", config.intermediate_size, hidden, config.mlp_bias)
            for name in ("gate", "up")
        )
        output = self._take_linear(checkpoint, f"{attention}o_proj", hidden, widths[0], config.output_bias)
        down = self._take_linear(checkpoint, f"{mlp}down_proj", hidden, config.intermediate_size, config.mlp_bias)
        norms = [
            self._vector(checkpoint, f"{attention}{name}_norm.weight", dim) if config.qk_norm else None for name in "qk"
        ]
        return LayerArgs(
            self._vector(checkpoint, f"{prefix}input_layernorm.weight", hidden),
            *norms,
            self._vector(checkpoint, f"{prefix}post_attention_layernorm.weight", hidden),
            self._pack(torch.cat([weight for weight, _ in qkv]), _joined([bias for _, bias in qkv])).args(),
            self._pack(*output).args(),
            self._pack(
                _interleaved(gate[0], up[0]),
                None if gate[1] is None or up[1] is None else _interleaved(gate[1], up[1]),
            ).args(),
            self._pack(*down).args(),
            config.windows[layer] or 0,
        )

    def _take_linear(
        self, checkpoint: Checkpoint, name: str, outputs: int, inputs: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight = checkpoint.take(f"{name}.weight", outputs, inputs)
        return weight, checkpoint.take(f"{name}.bias", outputs) if biased else None

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
        matrix = pack_matrix(self.thread_pool, weight, bias, int8=self._int8, memory=self._memory)
        self._keep_alive.append(matrix)
        return matrix

    def _vector(self, checkpoint: Checkpoint, name: str, size: int) -> int:
        vector = checkpoint.take(name, size).float().contiguous()
        self._keep_alive.append(vector)
        return vector.data_ptr()


def load_compiled(config: ModelConfig, directory: Path, dtype: torch.dtype, kernels: CompiledKernels) -> CompiledLlama:
    """The model of a directory. Raises UnsupportedModel where its tensors are not those of its config."""
    with torch.inference_mode(), Checkpoint(directory, dtype, torch.device("cpu")) as checkpoint:
        model = CompiledLlama(config, checkpoint, kernels.thread_pool, int8=kernels.int8)
        checkpoint.check_all_taken()
        return model


class CompiledForward:
    """A `Forward`: the compiled model over its cache."""

    def __init__(self, model: CompiledLlama, cache: Tensor, arguments: ModelArgs) -> None:
        self._model, self._cache = model, cache
        self._logits = torch.empty(0, model.config.vocab_size)
        self._argmax: NDArray[np.int64] = np.empty(0, np.int64)
        self._library = model.thread_pool.library
        # The team's threads are the ones that compute. Others, which torch would keep spinning, would take their place.
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
        """As `quire_kernels.cpu.sample.likeliest`, of the logits returned last: found by the call that gave them."""
        if logits.data_ptr() != self._logits.data_ptr() or len(logits) != len(self._argmax):
            raise ValueError("logits: must be those that the last forward pass returned")
        return self._argmax

    def _logits_of(self, num_samples: int) -> Tensor:
        if len(self._logits) < num_samples:
            # Fresh memory of that size would be page-faulted in for each step.
            self._logits = torch.empty(num_samples, self._model.config.vocab_size)
        return self._logits[:num_samples]

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.quire_llama_delete(self._handle)
            self._handle = None


def _joined(biases: list[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present) if present else None


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Sixteen outputs of the gate, then the same of up, and so on, padded with zeros."""
    both = []
    for part in (gate, up):
        padded = torch.cat([part, part.new_zeros(-len(part) % _LANES, *part.shape[1:])])
        both.append(padded.view(-1, 1, _LANES, *part.shape[1:]))
    return torch.cat(both, 1).flatten(0, 2)
