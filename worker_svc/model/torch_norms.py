"""Norms by torch's operators."""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.linear_description import Norm, NormKind


class TorchNorm(Protocol):
    """A normalisation of the last dimension, computed in float32."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` of any dtype, normalised, in the model's dtype."""


class TorchRmsNorm:
    """Root mean square normalisation (arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, epsilon: float, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype
        self._shape, self._epsilon = list(weight.shape), epsilon

    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.rms_norm(inputs.float(), self._shape, self._weight, self._epsilon).to(self._dtype)


class TorchLayerNorm:
    """Layer normalisation (arXiv:1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype
        self._bias = None if bias is None else bias.float()
        self._shape, self._epsilon = list(weight.shape), epsilon

    def __call__(self, inputs: Tensor) -> Tensor:
        normed = F.layer_norm(inputs.float(), self._shape, self._weight, self._bias, self._epsilon)
        return normed.to(self._dtype)


def normalized(norm: TorchNorm | None, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of hidden states as products take them, in the model's `dtype`; None: without a norm."""
    return hidden.to(dtype, copy=True) if norm is None else norm(hidden)


def make_torch_norm(norm: Norm, weight: Tensor, bias: Tensor | None) -> TorchNorm:
    """A norm; `weight` and `bias` [norm.size] are in the model's dtype, as the checkpoint has them."""
    if norm.kind is NormKind.LAYER:
        return TorchLayerNorm(norm.weight_of(weight), bias, norm.eps, weight.dtype)
    return TorchRmsNorm(norm.weight_of(weight), norm.eps, weight.dtype)
