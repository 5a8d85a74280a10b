"""Products with weights that are laid out once for the processor."""

from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.thread_pool import ThreadPool, type_of

PANEL = 32
# Outputs that are quantized at once.
_ROWS = 256


class MatrixFormat(IntEnum):
    """`Format` of linear.h: in which form weights are multiplied."""

    PLAIN = 0
    """In the dtype of the inputs."""
    INT8 = 1
    """In 8 bits with a scale for each output; multiplied as numbers of the inputs' dtype."""
    W8A8 = 2
    """As INT8, and multiplied as such: inputs are rounded to 8 bits, each row with a scale for each 128 inputs."""


class MatrixArgs(Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("format", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A linear map, laid out for the processor."""

    outputs: int
    inputs: int
    dtype: torch.dtype  # of its inputs
    matrix_format: MatrixFormat
    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def args(self) -> MatrixArgs:
        """The library's structure, valid as long as this object."""
        return MatrixArgs(
            self.outputs,
            self.inputs,
            self.matrix_format,
            self.panels.data_ptr(),
            *(None if each is None else each.data_ptr() for each in (self.scales, self.bias)),
        )


def pack_matrix(
    thread_pool: ThreadPool,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    matrix_format: MatrixFormat = MatrixFormat.PLAIN,
    memory: LargePages | None = None,
    input_multiple: int = 1,
    code_scales: Tensor | None = None,
) -> PackedMatrix:
    """Lays out a weight [outputs, inputs] of float32 or bfloat16, and a bias [outputs], in `memory` if given.

    In 8 bits, values are rounded to 255 steps between the largest of their output and its negative, or to multiples of
    `code_scales`, float32 [outputs], where these are not 0: of weights that were in 8 bits before. The matrix has a
    multiple of `input_multiple` inputs; the weights of those that are added are zeros. Raises ValueError for another
    dtype.
    """
    outputs, inputs = weight.shape
    padded = -(-inputs // input_multiple) * input_multiple
    is_w8a8 = matrix_format is MatrixFormat.W8A8
    dtype = weight.dtype
    type_of(dtype)
    values = 4 if is_w8a8 else 1 if dtype == torch.float32 else 2
    scales = None
    if matrix_format is not MatrixFormat.PLAIN:
        weight, scales = _quantized(weight, torch.zeros(outputs) if code_scales is None else code_scales)
        scales = _padded(scales)
    if is_w8a8:
        weight = weight.view(torch.uint8).bitwise_xor_(128)  # the code + 128, see codes.h
    weight = weight.contiguous()
    steps = -(-padded // values)
    size = -(-outputs // PANEL) * steps * PANEL * values
    panels = torch.empty(size, dtype=weight.dtype) if memory is None else memory.empty(size, weight.dtype)
    thread_pool.library.quire_pack(
        weight.data_ptr(), outputs, inputs, weight.element_size(), values, steps, panels.data_ptr()
    )
    biases = None if bias is None else _padded(bias.float())
    return PackedMatrix(outputs, padded, dtype, matrix_format, panels, scales, biases)


def linear(thread_pool: ThreadPool, inputs: Tensor, matrix: PackedMatrix) -> Tensor:
    """The float32 products [rows, outputs] of `inputs` [rows, inputs], float32 or bfloat16."""
    kind = type_of(matrix.dtype)
    require(inputs.dtype == matrix.dtype, "inputs", "have the dtype that the matrix is packed for")
    require(inputs.ndim == 2 and inputs.shape[1] == matrix.inputs, "inputs", f"be [rows, {matrix.inputs}]")
    padded = torch.nn.functional.pad(inputs, (0, -inputs.shape[1] % PANEL)).contiguous()
    output = torch.empty(len(inputs), matrix.outputs)
    thread_pool.library.quire_linear(
        thread_pool.handle,
        kind,
        byref(matrix.args()),
        padded.data_ptr(),
        len(inputs),
        padded.shape[1],
        output.data_ptr(),
    )
    return output


def _quantized(weight: Tensor, known_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [outputs, inputs] and scales float32 [outputs], for some outputs at once: float32 is large."""
    codes, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        values = weight[rows].float()
        chosen = values.abs().amax(1).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
        scales[rows] = torch.where(known_scales[rows] > 0, known_scales[rows], chosen)
        codes[rows].copy_((values / scales[rows, None]).round_().clamp_(-128, 127))
    return codes, scales


def _padded(row: Tensor) -> Tensor:
    return torch.nn.functional.pad(row, (0, -len(row) % PANEL)).contiguous()
