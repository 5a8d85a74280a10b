"""Norms, as the compiled forward passes take them."""

from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor
from torch.nn.functional import pad

from quire_kernels._checks import require

# The lanes of a vector: weights are padded to a multiple of it.
_LANES = 16


class NormCode(IntEnum):
    """`NormKind` of norms.h."""

    RMS = 0
    LAYER = 1


class NormArgs(Structure):
    """`Norm` of norms.h. All zeros: there is no norm."""

    _fields_ = (("kind", c_int64), ("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float))


@dataclass(frozen=True, eq=False)
class PackedNorm:
    """A norm's weight, and the bias of a layer norm, float32 and padded with zeros to whole vectors."""

    kind: NormCode
    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def args(self) -> NormArgs:
        """The library's structure, valid as long as this object."""
        return NormArgs(
            self.kind, self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr(), self.epsilon
        )


def pack_norm(kind: NormCode, weight: Tensor, bias: Tensor | None, epsilon: float) -> PackedNorm:
    """A norm of a weight [size] and a bias [size], which only a layer norm may have; None: zeros."""
    require(bias is None or kind is NormCode.LAYER, "bias", "be None, since an RMS norm has none")
    require(bias is None or bias.shape == weight.shape, "bias", "have the shape of the weight")
    if bias is None and kind is NormCode.LAYER:
        bias = weight.new_zeros(weight.shape)
    return PackedNorm(kind, _padded(weight), None if bias is None else _padded(bias), epsilon)


def _padded(vector: Tensor) -> Tensor:
    return pad(vector.float(), (0, -len(vector) % _LANES)).contiguous()
