"""The functions between the products of an MLP, as the compiled forward passes take them."""

from enum import IntEnum


class ActivationCode(IntEnum):
    """`Activation` of activations.h."""

    GELU = 0
    GELU_TANH = 1
    SILU = 2
    RELU = 3
    RELU2 = 4
    SWIGLU_OAI = 5
    """Of a gate and up alone."""
