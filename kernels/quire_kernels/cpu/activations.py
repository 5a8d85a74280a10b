"""The functions between the products of an MLP, as the compiled forward passes take them."""

from enum import IntEnum


class ActivationCode(IntEnum):
    """`Activation` of activations.h."""

    GELU = 0
    GELU_TANH = 1
    SILU = 2
    RELU = 3
    SWIGLU_OAI = 4
    """Of a gate and up alone."""
