"""A described model on a GPU, over its KV cache: the layers of `triton_body`, and logits of sampled tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.logits_epilogue import logits_epilogue
from worker_svc.cache import KVCache
from worker_svc.description import WorkerLimits
from worker_svc.errors import UnsupportedModel
from worker_svc.executor import CudaGraphOptions, Executor
from worker_svc.gpu.device_attention import DEFAULT_BACKEND
from worker_svc.gpu.executor import DeviceExecutor
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import build
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.linear_weights import WeightParts
from worker_svc.model.triton_body import (
    AttentionLimits,
    TritonBody,
    TritonBodyBuilder,
    check_description,
    make_attention,
)
from worker_svc.model.weights import Checkpoint, ReadMeter, open_checkpoint
from worker_svc.model_layout import ModelLayout


@dataclass(frozen=True, slots=True)
class _DeviceHead:
    """The head's weight [vocab_size, hidden_size] and its bias [vocab_size]."""

    weight: Tensor
    bias: Tensor | None


class _TritonBuilder(TritonBodyBuilder):
    """Makes all of the GPU's weights from a checkpoint's."""

    def head(self, weights: WeightParts) -> _DeviceHead:
        return _DeviceHead(*weights.fused())


class TritonModel:
    """A model's weights on its device. With `deterministic`, a token's bits do not depend on other tokens of the
    step. Executors compute attention by the backend of the name `attention_backend`. `quantization` is the format of
    layers; the head is in the model's dtype, because it is often the embedding and errors in it affect every token.
    """

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        *,
        deterministic: bool = False,
        attention_backend: str = DEFAULT_BACKEND,
        quantization: Quantization | None = None,
    ) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_description(description)
        if description.layout.keys_hold_values and attention_backend != DEFAULT_BACKEND:
            refused = f"latent attention by QUIRE_ATTENTION_BACKEND {attention_backend}"
            raise UnsupportedModel(f"the Triton kernels do not compute {refused}")
        self.description = description
        self.deterministic, self.attention_backend = deterministic, attention_backend
        built = build(description, checkpoint, _TritonBuilder(deterministic, quantization))
        self.body, self.head = TritonBody(description, built), built.head

    @property
    def layout(self) -> ModelLayout:
        return self.description.layout

    def executor(self, cache: KVCache, limits: WorkerLimits, graphs: CudaGraphOptions) -> Executor:
        forward = TritonForward(self, cache, limits)
        return DeviceExecutor(
            forward,
            limits,
            cache.device,
            cuda_graphs=graphs.enabled,
            report=graphs.report,
            deterministic=self.deterministic,
        )


def load_triton_model(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
    attention_backend: str = DEFAULT_BACKEND,
    quantization: Quantization | None = None,
    meter: ReadMeter | None = None,
) -> TritonModel:
    """Loads the model of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    with open_checkpoint(directory, dtype, device, meter) as checkpoint:
        return TritonModel(
            description,
            checkpoint,
            deterministic=deterministic,
            attention_backend=attention_backend,
            quantization=quantization,
        )


class TritonForward:
    """A `worker_svc.gpu.forward_graphs.DeviceForward`: the model over its cache."""

    graph_problem = None

    def __init__(self, model: TritonModel, cache: KVCache, limits: WorkerLimits) -> None:
        self._model = model
        self._caches = cache.of_layers(model.description.layout)
        most = AttentionLimits(limits.max_step_tokens, limits.max_sequences, limits.context_length)
        self.attention = make_attention(
            model.description,
            model.body.dtype,
            self._caches,
            most,
            model.attention_backend,
            deterministic=model.deterministic,
        )

    def __call__(self, inputs: ForwardInputs, sampled: Tensor, logits: Tensor) -> None:
        attend, samples = self.attention.attend(inputs), len(logits) > 0
        normed = self._model.body(inputs, sampled, self._caches, attend, stores_only=not samples)
        if samples:
            self._compute_logits(normed, logits)

    def _compute_logits(self, normed: Tensor, logits: Tensor) -> None:
        """The last product is returned in float32: logits of about 25 are 0.125 apart in bfloat16, which makes many
        ties.
        """
        head = self._model.head
        if self._model.deterministic:
            invariant_linear(normed, head.weight, out=logits)
        elif normed.dtype == torch.float32 or normed.device.type == "cpu":  # which has no product into float32
            torch.mm(normed.float(), head.weight.float().t(), out=logits)
        else:
            torch.mm(normed, head.weight.t(), out_dtype=torch.float32, out=logits)
        described = self._model.description
        scale = None if described.logits_scale == 1.0 else described.logits_scale
        logits_epilogue(logits, head.bias, described.logits_soft_cap, scale=scale)
