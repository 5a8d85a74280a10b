"""Matrix products with constant weights: plain, or in a layout for the CPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.description import Activation


class Linear(Protocol):
    """A fixed linear map of [num_tokens, in_features] to [num_tokens, out_features]."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """The product with `inputs`."""

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """The float32 `residual` plus the product with `inputs`; `residual` may be overwritten."""


def make_linear(weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
    """The fastest form of a weight [out_features, in_features] on its device. The weight itself is not kept on a
    CPU. With `activation` the map is not linear: the function follows the product, but not in `add`.
    """
    if _one_dnn_takes(weight):
        return OneDnnLinear(weight, bias, activation)
    return PlainLinear(weight, bias, activation)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.RELU: F.relu,
}
"""The functions; each returns a new tensor."""
# As oneDNN names the function and its algorithm.
_ONE_DNN_ACTIVATIONS = {
    None: ("none", ""),
    Activation.GELU: ("gelu", "none"),
    Activation.GELU_TANH: ("gelu", "tanh"),
    Activation.SILU: ("swish", ""),
    Activation.RELU: ("relu", ""),
}


class PlainLinear:
    """torch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._activation = None if activation is None else ACTIVATIONS[activation]

    def __call__(self, inputs: Tensor) -> Tensor:
        product = F.linear(inputs, self._weight, self._bias)
        return product if self._activation is None else self._activation(product)

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(F.linear(inputs, self._weight, self._bias))


class OneDnnLinear:
    """oneDNN's product, with a weight in the blocked layout that torch would otherwise create for each product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        self._function, self._algorithm = _ONE_DNN_ACTIVATIONS[activation]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, inputs: Tensor) -> Tensor:
        product: Tensor = self._multiply(inputs, self._weight, self._bias, self._function, [], self._algorithm)
        return product

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        if inputs.dtype != residual.dtype:
            return residual.add_(self._multiply(inputs, self._weight, self._bias, "none", [], ""))
        total: Tensor = self._multiply_add(inputs, residual, self._weight, self._bias, "add")
        return total


def _one_dnn_takes(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
