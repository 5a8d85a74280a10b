"""The parts of a decoder layer by torch's operators: attention's projections and rotation, and the MLP.

The hidden state is float32; norms return the model's dtype, in which products are computed.
"""

from typing import TypeAlias

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.attention import StepAttention
from worker_svc.model.building import BuiltBeside, BuiltLayer, ExpertWeights
from worker_svc.model.description import AttentionSpec, Norm
from worker_svc.model.linear import ACTIVATIONS, Linear, make_linear
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.rope import Rotation
from worker_svc.model.torch_experts import TorchExperts, build_torch_experts
from worker_svc.model.torch_mlp import activated
from worker_svc.model.torch_norms import TorchNorm, make_torch_norm, normalized

TorchLayer: TypeAlias = BuiltLayer[Linear, TorchNorm, TorchExperts]


class TorchBodyBuilder:
    """Makes torch's weights of layers from a checkpoint's."""

    def linear(self, weights: LinearWeights) -> Linear:
        return make_linear(*weights.fused())

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> TorchNorm:
        return make_torch_norm(norm, weight, bias)

    def experts(self, weights: ExpertWeights) -> TorchExperts:
        return build_torch_experts(weights)


def attend(
    number: int, layer: TorchLayer, inputs: Tensor, rotation: Rotation | None, attention: StepAttention
) -> Tensor:
    """The attention output of each token of `inputs` [num_tokens, hidden] in a layer, before the output product."""
    spec = layer.spec.attention
    num_heads, num_rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
    heads = layer.qkv(inputs).view(len(inputs), -1, spec.head_dim)
    if layer.query_norm is None and layer.key_norm is None:
        both = heads[:, :num_rotated] if rotation is None else rotation(heads[:, :num_rotated])
        query, key = both[:, :num_heads], both[:, num_heads:]
    else:
        query = _rotated(heads[:, :num_heads], layer.query_norm, rotation, spec)
        key = _rotated(heads[:, num_heads:num_rotated], layer.key_norm, rotation, spec)
    if rotation is not None:
        query = rotation.scale_queries(query)
    if spec.shared_layer is not None:
        return attention(number, query, None, None, layer.sinks).flatten(1)
    value = heads[:, num_heads if spec.values_are_keys else num_rotated :]
    if spec.value_norm_eps is not None:
        value = F.rms_norm(value.float(), [spec.head_dim], None, spec.value_norm_eps).to(value.dtype)
    return attention(number, query, key, value, layer.sinks).flatten(1)


def add_outputs(layer: TorchLayer, gathered: Tensor, hidden: Tensor) -> Tensor:
    """The hidden states float32 [num_tokens, hidden] after a layer, given what its attention returned and those before
    it, which may be overwritten.
    """
    dtype = gathered.dtype
    side_by_side = normalized(layer.mlp_norm, hidden, dtype) if layer.spec.parallel else None
    hidden = _add(layer.output, gathered, hidden, layer.post_attention_norm)
    normed = normalized(layer.mlp_norm, hidden, dtype) if side_by_side is None else side_by_side
    if isinstance(layer.mlp, TorchExperts):
        output = layer.mlp(normed) if layer.beside is None else _both(layer.beside, layer.mlp, normed, hidden)
        return hidden.add_(output if layer.post_mlp_norm is None else layer.post_mlp_norm(output))
    return _add(layer.mlp.down, activated(layer.mlp, normed), hidden, layer.post_mlp_norm)


def add_input(layer: TorchLayer, vectors: Tensor | None, hidden: Tensor) -> Tensor:
    """The hidden states float32 [num_tokens, hidden] at the end of a layer, given those after its MLP, which are
    overwritten, and the layer's own `vectors` [num_tokens, width].
    """
    if layer.input is not None and vectors is not None:
        gate = ACTIVATIONS[layer.input.spec.activation](layer.input.gate(hidden.to(vectors.dtype)))
        hidden = _add(layer.input.up, gate.mul_(vectors), hidden, layer.input.norm)
    return hidden if layer.scale == 1.0 else hidden.mul_(layer.scale)


def _both(beside: BuiltBeside[Linear, TorchNorm], experts: TorchExperts, normed: Tensor, hidden: Tensor) -> Tensor:
    """What experts and the MLP beside them return, float32 [num_tokens, hidden]."""
    mixed = beside.experts_post_norm(experts(normed, beside.router_norm(hidden)))
    dense = beside.mlp.down(activated(beside.mlp, beside.norm(hidden)))
    return beside.post_norm(dense).float() + mixed


def _rotated(heads: Tensor, norm: TorchNorm | None, rotation: Rotation | None, spec: AttentionSpec) -> Tensor:
    if norm is not None and not spec.norms_after_rotation:
        heads = norm(heads.flatten(1)).view(heads.shape) if spec.has_joint_norms else norm(heads)
    if rotation is not None:
        heads = rotation(heads)
    return norm(heads) if norm is not None and spec.norms_after_rotation else heads


def _add(linear: Linear, inputs: Tensor, hidden: Tensor, norm: TorchNorm | None) -> Tensor:
    return linear.add(inputs, hidden) if norm is None else hidden.add_(norm(linear(inputs)))
