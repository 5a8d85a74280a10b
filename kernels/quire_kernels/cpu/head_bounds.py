"""Upper bounds of a head's logits, by products in 8 bits: where the largest is wanted, few logits are computed."""

from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire_kernels._checks import require
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.linear import PANEL, MatrixArgs, PackedMatrix, pack_codes, quantize_in_8_bits
from quire_kernels.cpu.thread_pool import ThreadPool

# Inputs that are rotated together: MOST_ROTATED of logit_bounds.h, and LANES.
_ROTATED = (64, 16)
# Of which a sum of products of bytes fits 32 bits.
_MOST_INPUTS = 2**15
# Added to each norm: see LEAST of logit_bounds.h.
_LEAST = 1e-16
# Outputs that are rounded at once: float32 is large.
_ROWS = 1024


class HeadBoundsArgs(Structure):
    """`HeadBounds` of logit_bounds.h."""

    _fields_ = (
        ("codes", MatrixArgs),
        ("rotation", c_void_p),
        ("rotated", c_int64),
        ("norms", c_void_p),
        ("errors", c_void_p),
        ("scale", c_float),
    )


@dataclass(frozen=True, eq=False)
class PackedHeadBounds:
    """A head's weights in 8 bits, and by how much products with them may be wrong."""

    codes: PackedMatrix
    rotation: Tensor
    """float32 [rotated, rotated], orthogonal and symmetric."""
    norms: Tensor
    """float32 [outputs, padded to whole panels with minus infinity], of the weights of each."""
    errors: Tensor
    """float32 [outputs, padded with zeros], of what rounding has changed of them."""

    def args(self, scale: float = 1.0) -> HeadBoundsArgs:
        """The library's structure for logits times `scale`, which is above 0; valid as long as this object."""
        return HeadBoundsArgs(
            self.codes.args(),
            self.rotation.data_ptr(),
            len(self.rotation),
            self.norms.data_ptr(),
            self.errors.data_ptr(),
            scale,
        )


def can_bound(num_inputs: int) -> bool:
    """Whether a head with so many inputs can have bounds."""
    return num_inputs <= _MOST_INPUTS and any(num_inputs % rotated == 0 for rotated in _ROTATED)


def pack_head_bounds(
    thread_pool: ThreadPool, weight: Tensor, memory: LargePages | None = None
) -> PackedHeadBounds | None:
    """Bounds for a head [outputs, inputs] without a bias, of float32 or bfloat16, which is packed in that dtype by
    `pack_matrix` too; in `memory` if given. None, where a weight is not finite.

    Raises ValueError for another shape, or where `can_bound` is false.
    """
    require(weight.ndim == 2 and weight.numel() > 0, "weight", "be [outputs, inputs], both above 0")
    outputs, inputs = weight.shape
    require(can_bound(inputs), "weight", f"have a multiple of {_ROTATED[-1]} inputs, at most {_MOST_INPUTS}")
    rotation = rotation_for(inputs)
    codes, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(outputs)
    norms, errors = torch.empty(outputs), torch.empty(outputs)
    for start in range(0, outputs, _ROWS):
        rows = slice(start, start + _ROWS)
        turned = rotate(weight[rows].float(), rotation)
        codes[rows], scales[rows] = quantize_in_8_bits(turned)
        norms[rows] = turned.norm(dim=1)
        errors[rows] = (codes[rows] * scales[rows, None]).sub_(turned).norm(dim=1)
    if not (norms.isfinite().all() and errors.isfinite().all()):
        return None
    norms.add_(_LEAST)
    errors.add_(_LEAST)
    packed = pack_codes(thread_pool, codes, scales, dtype=weight.dtype, memory=memory)
    # Outputs of padding have a bound below all others: zeros would be above logits that are all negative.
    padding = (0, -outputs % PANEL)
    return PackedHeadBounds(packed, rotation, pad(norms, padding, value=-torch.inf), pad(errors, padding))


def rotation_for(num_inputs: int) -> Tensor:
    """By what blocks of so many inputs are multiplied: Hadamard's matrix, float32 [rotated, rotated], whose rows have
    the norm 1. Its numbers are exact, since `rotated` is a power of four.
    """
    rotated = next(each for each in _ROTATED if num_inputs % each == 0)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    rotation = torch.ones(1, 1)
    while len(rotation) < rotated:
        rotation = torch.kron(rotation, pair)
    return rotation.div_(rotated**0.5)


def rotate(rows: Tensor, rotation: Tensor) -> Tensor:
    """Rows [count, inputs] times `rotation`, block by block."""
    return (rows.reshape(-1, len(rotation)) @ rotation).view(rows.shape)
