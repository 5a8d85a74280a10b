"""The formats of weights, and of the rows that they are multiplied with, that the Triton kernels compute."""

from enum import StrEnum

from worker_svc.model.support import BY_EVERY_BACKEND, Feature

COMPUTED = BY_EVERY_BACKEND | {Feature.EXPERT_GROUPS, Feature.LATENT_ATTENTION, Feature.SIGMOID_ROUTER}
"""The features that the Triton kernels compute."""


class Quantization(StrEnum):
    """Values of QUIRE_QUANTIZATION."""

    INT8 = "int8"
    """Weights in 8 bits with a scale for each output."""
    W8A8 = "w8a8"
    """The same, and rows in 8 bits with a scale for each: products of integers."""
    W4A16 = "w4a16"
    """Weights in 4 bits with a scale and a zero point for each group of inputs."""
    FP8 = "fp8"
    """Weights and rows in float8_e4m3fn: a scale for each output and each row, or for their groups of 128 inputs where
    a checkpoint has scales of blocks.
    """

    @property
    def keeps_nibbles(self) -> bool:
        """Whether layers whose codes have 4 bits in the checkpoint keep them, though 8 are asked."""
        return self is Quantization.INT8
