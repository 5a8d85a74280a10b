"""A described model by torch's operators on a CPU, where the compiled kernels cannot be used.

That is: in float16, without a C++ compiler, and with unsupported sizes of heads or blocks.

Products are in the model's dtype; their sum, the hidden state between layers, is float32. Rounding it to bfloat16 after
each product moves logits by enough to change near choices.
"""

from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.attention import AttentionBackend, AttentionKind, StepAttention, make_attention
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor, HostExecutor
from worker_svc.model.building import BuiltBody, BuiltLayer, build
from worker_svc.model.description import LinearLayer, ModelDescription, Norm
from worker_svc.model.head import Head
from worker_svc.model.linear import Linear, make_linear
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import Rotation, inverse_frequencies, rope_of
from worker_svc.model.support import Feature, check_computed
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint
from worker_svc.model_layout import ModelLayout

COMPUTED = frozenset({Feature.SOFT_CAP, Feature.NORM_EPSILONS, Feature.MLP_WIDTH_PER_LAYER})


class RmsNorm:
    """Root mean square normalisation of the last dimension (arXiv:1910.07467), in float32; the result has the model's
    dtype.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight, self._dtype = weight.float(), weight.dtype
        self._shape, self._epsilon = list(weight.shape), epsilon

    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.rms_norm(inputs.float(), self._shape, self._weight, self._epsilon).to(self._dtype)


Layer: TypeAlias = BuiltLayer[Linear, RmsNorm]


class TorchBodyBuilder:
    """Makes torch's weights of layers from a checkpoint's."""

    def linear(self, weights: LinearWeights) -> Linear:
        return make_linear(*weights.fused())

    def norm(self, norm: Norm, weight: Tensor) -> RmsNorm:
        return RmsNorm(weight, norm.eps)


class _TorchBuilder(TorchBodyBuilder):
    """Makes torch's weights from a checkpoint's."""

    def head(self, layer: LinearLayer, weight: Tensor) -> Head:
        return Head(weight)


class TorchBody:
    """A decoder without its head. Not thread-safe; run it under `torch.inference_mode`."""

    def __init__(self, description: ModelDescription, built: BuiltBody[Linear, RmsNorm]) -> None:
        self._embedding, self._layers, self._norm = built.embedding, built.layers, built.norm
        self._rope = rope_of(description)
        frequencies = inverse_frequencies(self._rope, description.layout.head_dim)
        self._frequencies = frequencies.to(self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation and of the KV cache."""
        return self._embedding.dtype

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: StepAttention, indices: Tensor | None = None
    ) -> Tensor:
        """The hidden states after the last norm, [num_indices, hidden_size] in the model's dtype.

        Args:
            token_ids, positions: int64 [num_tokens], the sequences one after another.
            attention: stores keys and values of these tokens, and attends to them and to those before.
            indices: int64 [num_indices], of the tokens whose states are returned; None: of all.
        """
        rotation = Rotation(positions, self._frequencies, self.dtype, self._rope.attention_factor)
        hidden = F.embedding(token_ids, self._embedding).float()
        for number, layer in enumerate(self._layers):
            gathered = _attend(number, layer, layer.attention_norm(hidden), rotation, attention)
            if indices is not None and layer is self._layers[-1]:
                # After the last layer's keys and values, only these tokens matter.
                if not len(indices):
                    return hidden.new_empty(0, hidden.shape[1], dtype=self.dtype)
                gathered, hidden = gathered[indices], hidden[indices]
            hidden = layer.output.add(gathered, hidden)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
            # SwiGLU (arXiv:2002.05202)
            hidden = layer.down.add(F.silu(gate).mul_(up), hidden)
        return self._norm(hidden)


class TorchModel:
    """A causal language model over a paged KV cache. Not thread-safe; run it under `torch.inference_mode`."""

    def __init__(
        self, description: ModelDescription, checkpoint: Checkpoint, kind: AttentionKind = AttentionKind.TORCH
    ) -> None:
        """`kind` is the attention: torch, or interpreted Triton kernels.

        Raises UnsupportedModel if the description is not supported, or tensors do not match it.
        """
        check_computed("torch's operators", description, COMPUTED)
        self.description = description
        self._kind = kind
        built = build(description, checkpoint, _TorchBuilder())
        self._body, self._head = TorchBody(description, built), built.head

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation and of the KV cache."""
        return self._body.dtype

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        return HostExecutor(TorchForward(self, make_attention(self._kind, cache, self.layout.layers)))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, logits_indices: Tensor) -> Tensor:
        """Computes a step's tokens.

        Args:
            token_ids, positions: int64 [num_tokens], the sequences one after another.
            attention: stores keys and values of these tokens, and attends over the cache.
            logits_indices: int64 [num_samples], indices into `token_ids` of the tokens whose next token is sampled.

        Returns:
            Logits float32 [num_samples, vocab_size].
        """
        hidden = self._body(token_ids, positions, attention, logits_indices)
        if not len(hidden):
            return torch.empty(0, self.description.vocab_size)
        return self._head(hidden)


class TorchForward:
    """A `worker_svc.forward.Forward`: the model over its cache, operator by operator."""

    def __init__(self, model: TorchModel, attention: AttentionBackend) -> None:
        self._model, self._attention = model, attention

    def __call__(self, batch: Batch) -> Tensor:
        return self._model.forward(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            self._attention.plan(batch),
            torch.from_numpy(batch.logits_indices),
        )


def load_torch_model(
    description: ModelDescription, directory: Path, dtype: torch.dtype, kind: AttentionKind = AttentionKind.TORCH
) -> TorchModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    cpu = torch.device("cpu")
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, cpu) as checkpoint:
        model = TorchModel(description, checkpoint, kind)
        checkpoint.check_all_taken()
        return model


def _attend(number: int, layer: Layer, inputs: Tensor, rotation: Rotation, attention: StepAttention) -> Tensor:
    """The attention output of each token of `inputs` [num_tokens, hidden] in a layer, before the output product."""
    spec = layer.spec.attention
    num_heads, num_rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
    heads = layer.qkv(inputs).view(len(inputs), -1, spec.head_dim)
    if layer.query_norm is None or layer.key_norm is None:
        rotated = rotation(heads[:, :num_rotated])
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        query = rotation(layer.query_norm(heads[:, :num_heads]))
        key = rotation(layer.key_norm(heads[:, num_heads:num_rotated]))
    return attention(number, query, key, heads[:, num_rotated:]).flatten(1)
