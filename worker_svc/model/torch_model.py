"""A described model by torch's operators on a CPU, where the compiled kernels cannot be used.

That is: in float16, without a C++ compiler, and with unsupported sizes of heads or blocks.

Products are in the model's dtype; their sum, the hidden state between layers, is float32. Rounding it to bfloat16 after
each product moves logits by enough to change near choices.
"""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.attention import AttentionBackend, AttentionKind, StepAttention, make_attention
from worker_svc.batch import Batch
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.executor import CudaGraphOptions, Executor, HostExecutor
from worker_svc.model.building import BuiltBody, build
from worker_svc.model.description import ModelDescription
from worker_svc.model.head import Head
from worker_svc.model.linear import Linear
from worker_svc.model.linear_weights import WeightParts
from worker_svc.model.rope import Rotation, layer_ropes, query_factors
from worker_svc.model.support import BY_EVERY_BACKEND, Feature, check_computed
from worker_svc.model.torch_experts import TorchExperts
from worker_svc.model.torch_latent import attend_latent
from worker_svc.model.torch_layers import TorchBodyBuilder, add_input, add_outputs, attend
from worker_svc.model.torch_norms import TorchNorm, normalized
from worker_svc.model.weights import Checkpoint, ReadMeter, open_checkpoint
from worker_svc.model_layout import ModelLayout

COMPUTED = BY_EVERY_BACKEND | {
    Feature.EXPERT_GROUPS,
    Feature.LATENT_ATTENTION,
    Feature.SIGMOID_ROUTER,
    Feature.SINGLE_HEAD_NORM,
}


class _TorchBuilder(TorchBodyBuilder):
    """Makes torch's weights from a checkpoint's."""

    def head(self, weights: WeightParts) -> Head:
        return Head(*weights.fused())


class TorchBody:
    """A decoder without its head. Not thread-safe; run it under `torch.inference_mode`."""

    def __init__(self, description: ModelDescription, built: BuiltBody[Linear, TorchNorm, TorchExperts]) -> None:
        self._embedding, self._positions = built.embedding, built.positions
        self._layers, self._norm = built.layers, built.norm
        self._scale, self._inputs = built.embedding_scale, built.layer_inputs
        ropes, device = layer_ropes(description), self._embedding.device
        self._ropes = [(rope.frequencies().to(device), rope.config) for rope in ropes.distinct]
        self._rope_of_layers = ropes.of_layers

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
        rotations = [
            Rotation(positions, frequencies, self.dtype, rope.attention_factor, query_factors(rope, positions))
            for frequencies, rope in self._ropes
        ]
        hidden = self._embed(token_ids, positions)
        vectors = self._layer_inputs(token_ids, hidden)
        for number, (layer, rope) in enumerate(zip(self._layers, self._rope_of_layers, strict=True)):
            rotation = None if rope is None else rotations[rope]
            attend_layer = attend if layer.latent is None else attend_latent
            inputs = normalized(layer.attention_norm, hidden, self.dtype)
            gathered = attend_layer(number, layer, inputs, rotation, attention)
            if indices is not None and layer is self._layers[-1]:
                # After the last layer's keys and values, only these tokens matter.
                if not len(indices):
                    return hidden.new_empty(0, hidden.shape[1], dtype=self.dtype)
                gathered, hidden = gathered[indices], hidden[indices]
                vectors = None if vectors is None else vectors[indices]
            hidden = add_outputs(layer, gathered, hidden)
            hidden = add_input(layer, None if vectors is None else vectors[:, number], hidden)
        return self._norm(hidden)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """float32 [num_tokens, hidden_size]"""
        hidden = F.embedding(token_ids, self._embedding).float()
        if self._scale != 1.0:
            hidden *= self._scale
        if self._positions is not None:
            hidden += F.embedding(positions, self._positions)
        return hidden

    def _layer_inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' own vectors [num_tokens, num_layers, width] in the model's dtype; None: they have none."""
        if (inputs := self._inputs) is None:
            return None
        shape = len(token_ids), len(self._layers), inputs.spec.width
        projected = inputs.norm(inputs.projection(hidden.to(self.dtype)).view(shape))
        vectors = F.embedding(token_ids, inputs.embedding).view(shape).mul_(inputs.embedding_scale)
        return vectors.add_(projected).mul_(inputs.spec.scale)


class TorchModel:
    """A causal language model over a paged KV cache. Not thread-safe; run it under `torch.inference_mode`."""

    def __init__(self, description: ModelDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("torch's operators", description, COMPUTED)
        self.description = description
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
        return HostExecutor(TorchForward(self, self._attention(cache)))

    def _attention(self, cache: KVCache) -> AttentionBackend:
        return make_attention(AttentionKind.TORCH, cache, self.layout, self.dtype)

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
        logits = self._head(hidden)
        if self.description.logits_scale != 1.0:
            logits *= self.description.logits_scale
        cap = self.description.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


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
    description: ModelDescription, directory: Path, dtype: torch.dtype, meter: ReadMeter | None = None
) -> TorchModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    cpu = torch.device("cpu")
    with open_checkpoint(directory, dtype, cpu, meter) as checkpoint:
        return TorchModel(description, checkpoint)
