"""Linear layers and norms of a description: of each tensor its name in the checkpoint, its shape and its role."""

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from torch import Tensor


class InvalidDescription(ValueError):  # noqa: N818
    """Sizes that contradict each other. The text names the field and says what it must be."""


def require(holds: bool, name: str, must_be: str) -> None:
    """Raises InvalidDescription unless a field holds."""
    if not holds:
        raise InvalidDescription(f"{name}: must be {must_be}")


def require_epsilon(name: str, eps: float) -> None:
    """Raises InvalidDescription unless a norm may have this epsilon: it is added to a mean of squares, or a variance,
    of which the root is taken.
    """
    require(math.isfinite(eps) and eps >= 0, name, f"of an epsilon of 0 or more, not {eps!r}")


class LinearRole(StrEnum):
    """The purpose of a linear layer."""

    QKV = "qkv"
    LATENT_UP = "latent_up"
    ATTENTION_OUTPUT = "attention_output"
    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTER = "router"
    LAYER_INPUTS = "layer_inputs"
    INPUT_GATE = "input_gate"
    INPUT_UP = "input_up"
    HEAD = "head"


class ComputedFormat(StrEnum):
    """The format in which the weight of a linear layer is kept and multiplied."""

    MODEL = "model"
    """The dtype that the model computes in."""
    INT8 = "int8"
    """8 bits, with a scale for each output; multiplied as numbers of the model's dtype (W8A16)."""
    W8A8 = "w8a8"
    """As INT8, and multiplied as such: each row of inputs is rounded to 8 bits, with a scale for each 128 of them."""
    W4A16 = "w4a16"
    """4 bits, with a scale and a zero point for each output and group of inputs; multiplied as numbers of the model's
    dtype.
    """
    W4A8 = "w4a8"
    """As W4A16, and multiplied as such: inputs are rounded to 8 bits, with a scale for each group."""


class SplitDimension(StrEnum):
    """The dimension of a weight [outputs, inputs] that ranks divide among them."""

    OUTPUTS = "outputs"
    """Each rank computes some of the outputs, of every part its share."""
    INPUTS = "inputs"
    """Each rank computes a summand of all outputs, from its share of the inputs."""


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer as the checkpoint stores it: `name`.weight [sum of outputs, inputs], and optionally `name`.bias.

    `outputs` are the widths of its parts, side by side: (queries, keys, values) if one tensor holds all three. Adapters
    name stored layers too.
    """

    name: str
    outputs: tuple[int, ...]
    bias: bool = False
    transposed: bool = False
    """The stored weight is [inputs, sum of outputs]."""
    interleaved: int | None = None
    """The parts take turns, each with this many outputs: those of one head. None: each part is whole."""
    reversed: bool = False
    """The last part is stored first."""

    def __post_init__(self) -> None:
        if self.interleaved is not None:
            alike = len(set(self.outputs)) == 1 and self.outputs[0] % self.interleaved == 0
            require(alike, self.name, f"of parts with the same number of outputs, a multiple of {self.interleaved}")

    @property
    def spans(self) -> tuple[range, ...]:
        """Of each part, in order, the outputs of the stored layer that it has. Parts do not take turns."""
        step = -1 if self.reversed else 1
        widths = self.outputs[::step]
        spans = tuple(range(end - width, end) for width, end in zip(widths, accumulate(widths), strict=True))
        return spans[::step]


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer that a backend computes as one product: the parts of its stored layers, side by side."""

    role: LinearRole
    inputs: int
    stored: tuple[StoredLinear, ...]
    split: SplitDimension
    split_unit: int = 1
    """Outputs of each part, or inputs, that stay together on a rank: those of one head."""
    computed: ComputedFormat | None = None
    """None: what the worker's settings choose."""
    rotated_neighbours: int | None = None
    """QKV: of each head of queries and keys, how many first dimensions the model rotates in pairs (2i, 2i + 1). Weights
    and biases are read in an order in which the pairs are (i, i + this / 2), as backends rotate them: scores are the
    same. None: the model has them so.
    """

    @property
    def outputs(self) -> tuple[int, ...]:
        """The width of each part."""
        return tuple(width for stored in self.stored for width in stored.outputs)

    @property
    def biased(self) -> bool:
        """Whether any part has a bias; the biases of the other parts are zeros."""
        return any(stored.bias for stored in self.stored)


class NormKind(StrEnum):
    """The kind of a normalisation."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last dimension, and the checkpoint's tensor [size] that multiplies its result; one that
    is added to it, for a LAYER norm only.
    """

    tensor: str
    size: int
    eps: float
    kind: NormKind = NormKind.RMS
    weight_offset: float = 0.0
    """Added to the weight: 1 where a checkpoint stores its distance from 1."""
    bias: str | None = None
    weight_factor: float = 1.0
    """What the weight is then multiplied by."""

    def __post_init__(self) -> None:
        require_epsilon(self.tensor, self.eps)

    def weight_of(self, stored: Tensor) -> Tensor:
        """What multiplies the result, float32 [size]: 16 bits would round a sum or product of the stored weight."""
        return (stored.float() + self.weight_offset) * self.weight_factor
