"""Products with weights that are laid out once for the processor."""

from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.grouped_bytes import ByteWeight, quantize_in_bytes
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.nibbles import GROUP_SIZES, NibbleWeight, quantize_in_nibbles, split_scales
from quire_kernels.cpu.thread_pool import ThreadPool, type_of

PANEL = 32
_PAGE = 4096  # a distance of rows that makes products slow, see `VectorFactors::width` of linear.h
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
    W4A16 = 3
    """In 4 bits with a scale and a zero point for each output and group of inputs; multiplied as numbers of the inputs'
    dtype, each rounded once.
    """
    W4A8 = 4
    """As W4A16, and multiplied as such: inputs are rounded to 8 bits, each row with a scale for each group."""
    GROUPED_W8A16 = 5
    """In 8 bits with a scale, and sometimes a minimum, for each output and group of inputs; otherwise as W4A16."""
    GROUPED_W8A8 = 6
    """As GROUPED_W8A16, and multiplied as W4A8."""

    @property
    def has_nibbles(self) -> bool:
        """Whether weights are in 4 bits."""
        return self in (MatrixFormat.W4A16, MatrixFormat.W4A8)

    @property
    def takes_codes(self) -> bool:
        """Whether inputs are rounded to 8 bits."""
        return self in (MatrixFormat.W8A8, MatrixFormat.W4A8, MatrixFormat.GROUPED_W8A8)

    @property
    def has_grouped_bytes(self) -> bool:
        """Whether weights are in 8 bits with a scale for each group."""
        return self in (MatrixFormat.GROUPED_W8A16, MatrixFormat.GROUPED_W8A8)


class MatrixArgs(Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("format", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("group", c_int64),
        ("order", c_void_p),
        ("has_minimums", c_int64),
        ("is_e2m1", c_int64),
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
    group: int = 0
    """Inputs with one scale, in formats with groups; in W8A8 how many inputs of a row share a scale, 0: 128."""
    order: Tensor | None = None
    """int32 [inputs]: which element of a row each input is; None: they are in order."""
    has_minimums: bool = False
    """Whether a number is code x scale + minimum, where groups have both."""
    is_e2m1: bool = False
    """In W4A16: whether codes are numbers of e2m1."""

    def args(self) -> MatrixArgs:
        """The library's structure, valid as long as this object."""
        return MatrixArgs(
            self.outputs,
            self.inputs,
            self.matrix_format,
            self.panels.data_ptr(),
            _address(self.scales),
            _address(self.bias),
            self.group,
            _address(self.order),
            self.has_minimums,
            self.is_e2m1,
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
    dtype: torch.dtype | None = None,
) -> PackedMatrix:
    """Lays out a weight [outputs, inputs] of float32 or bfloat16, and a bias [outputs], in `memory` if given. `dtype`
    is that of the inputs: the weight's, or in codes another one.

    In 8 bits, values are rounded to 255 steps between the largest of their output and its negative, or to multiples of
    `code_scales`, float32 [outputs], where these are not 0: of weights that were in 8 bits before. In 4 bits they are
    rounded by `quantize_in_nibbles`, in groups of 8 bits by `quantize_in_bytes`. The matrix has a multiple of
    `input_multiple` inputs, the added ones with weights of 0. Raises ValueError for another dtype, or shapes that do
    not fit each other.
    """
    require(weight.ndim == 2 and weight.numel() > 0, "weight", "be [outputs, inputs], both above 0")
    if matrix_format.has_nibbles:
        nibbles = quantize_in_nibbles(thread_pool, weight)
        return pack_nibbles(
            thread_pool,
            nibbles,
            bias,
            matrix_format=matrix_format,
            dtype=dtype or weight.dtype,
            memory=memory,
            input_multiple=input_multiple,
        )
    if matrix_format.has_grouped_bytes:
        return pack_grouped_bytes(
            thread_pool,
            quantize_in_bytes(weight),
            bias,
            matrix_format=matrix_format,
            dtype=dtype or weight.dtype,
            memory=memory,
            input_multiple=input_multiple,
        )
    scales = None
    dtype = dtype or weight.dtype
    require(matrix_format is not MatrixFormat.PLAIN or dtype == weight.dtype, "dtype", "be the weight's in PLAIN")
    if matrix_format is not MatrixFormat.PLAIN:
        weight, scales = quantize_in_8_bits(weight, code_scales)
    return _pack(
        thread_pool,
        weight,
        scales,
        bias,
        matrix_format=matrix_format,
        dtype=dtype,
        memory=memory,
        input_multiple=input_multiple,
    )


def pack_codes(
    thread_pool: ThreadPool, codes: Tensor, scales: Tensor, *, dtype: torch.dtype, memory: LargePages | None = None
) -> PackedMatrix:
    """Lays out a weight in W8A8, of codes int8 [outputs, inputs] and scales float32 [outputs], for inputs that have one
    scale a row; otherwise as `pack_matrix`. The codes are changed.
    """
    require(codes.ndim == 2 and codes.numel() > 0, "codes", "be [outputs, inputs], both above 0")
    is_fit = codes.dtype == torch.int8 and scales.shape == (len(codes),)
    require(is_fit, "codes", "be int8, with a scale for each output")
    packed = _pack(thread_pool, codes, scales, None, matrix_format=MatrixFormat.W8A8, dtype=dtype, memory=memory)
    return replace(packed, group=packed.inputs)


def _pack(
    thread_pool: ThreadPool,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    *,
    matrix_format: MatrixFormat,
    dtype: torch.dtype,
    memory: LargePages | None,
    input_multiple: int = 1,
) -> PackedMatrix:
    """Numbers in the dtype of the inputs, or codes, in panels."""
    outputs, inputs = weight.shape
    padded = -(-inputs // input_multiple) * input_multiple
    is_w8a8 = matrix_format is MatrixFormat.W8A8
    type_of(dtype)
    values = 4 if is_w8a8 else 1 if dtype == torch.float32 else 2
    if is_w8a8:
        weight = weight.view(torch.uint8).bitwise_xor_(128)  # the code + 128, see codes.h
    weight = weight.contiguous()
    steps = -(-padded // values)
    size = -(-outputs // PANEL) * steps * PANEL * values
    panels = _panels(size, weight.dtype, memory)
    width = weight.element_size()
    thread_pool.library.quire_pack(
        thread_pool.handle, weight.data_ptr(), outputs, inputs * width, values * width, steps, panels.data_ptr()
    )
    scales = None if scales is None else _padded(scales)
    return PackedMatrix(outputs, padded, dtype, matrix_format, panels, scales, _biases(bias, outputs))


def pack_nibbles(
    thread_pool: ThreadPool,
    weight: NibbleWeight,
    bias: Tensor | None = None,
    *,
    matrix_format: MatrixFormat,
    dtype: torch.dtype,
    memory: LargePages | None = None,
    input_multiple: int = 1,
) -> PackedMatrix:
    """Lays out a weight in 4 bits for inputs of a dtype, float32 or bfloat16; otherwise as `pack_matrix`.

    Scales and minimums have the 11 bits of float16, relative to the largest of their output.
    """
    type_of(dtype)
    require(matrix_format.has_nibbles, "matrix_format", "be one of 4 bits")
    is_fit = not weight.is_e2m1 or (matrix_format is MatrixFormat.W4A16 and not weight.has_minimums)
    require(is_fit, "matrix_format", "be W4A16 where codes are numbers of e2m1, without minimums")
    _check_groups(weight.codes, torch.uint8, weight.group, (weight.scales, weight.zeros))
    outputs, inputs = weight.codes.shape
    require(weight.order is None or weight.order.shape == (inputs,), "weight", f"have an order [{inputs}]")
    padded = -(-inputs // input_multiple) * input_multiple
    if weight.has_minimums:
        scales, zeros, factors = _split(weight.scales, weight.zeros, weight.factors)
    else:
        scales, factors = split_scales(weight.scales, weight.factors)
        zeros = weight.zeros.half()
    scales, zeros, codes = scales.contiguous(), zeros.contiguous(), weight.codes.contiguous()
    order = None
    if weight.order is not None:
        order = torch.cat([weight.order, torch.arange(inputs, padded)]).int()
    size = -(-outputs // PANEL) * -(-padded // weight.group) * (4 * PANEL + weight.group * PANEL // 2)
    panels = _panels(size, torch.uint8, memory)
    matrix = PackedMatrix(
        outputs,
        padded,
        dtype,
        matrix_format,
        panels,
        _padded(factors),
        _biases(bias, outputs),
        weight.group,
        order,
        weight.has_minimums,
        weight.is_e2m1,
    )
    thread_pool.library.quire_pack_nibbles(
        thread_pool.handle,
        codes.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        byref(matrix.args()),
        inputs,
        panels.data_ptr(),
    )
    return matrix


def pack_grouped_bytes(
    thread_pool: ThreadPool,
    weight: ByteWeight,
    bias: Tensor | None = None,
    *,
    matrix_format: MatrixFormat,
    dtype: torch.dtype,
    memory: LargePages | None = None,
    input_multiple: int = 1,
) -> PackedMatrix:
    """Lays out a weight in 8 bits with groups; otherwise as `pack_nibbles`."""
    type_of(dtype)
    require(matrix_format.has_grouped_bytes, "matrix_format", "be one of 8 bits with groups")
    _check_groups(weight.codes, torch.int8, weight.group, (weight.scales, weight.minimums))
    outputs, inputs = weight.codes.shape
    padded = -(-inputs // input_multiple) * input_multiple
    minimums = None
    if weight.minimums is None:
        scales, factors = split_scales(weight.scales, weight.factors)
    else:
        scales, minimums, factors = _split(weight.scales, weight.minimums, weight.factors)
        minimums = minimums.contiguous()
    scales, codes = scales.contiguous(), weight.codes.contiguous()
    head = 2 * PANEL * (1 if minimums is None else 2)
    size = -(-outputs // PANEL) * -(-padded // weight.group) * (head + weight.group * PANEL)
    panels = _panels(size, torch.uint8, memory)
    matrix = PackedMatrix(
        outputs,
        padded,
        dtype,
        matrix_format,
        panels,
        _padded(factors),
        _biases(bias, outputs),
        weight.group,
        has_minimums=minimums is not None,
    )
    thread_pool.library.quire_pack_grouped_bytes(
        thread_pool.handle,
        codes.data_ptr(),
        scales.data_ptr(),
        _address(minimums),
        byref(matrix.args()),
        inputs,
        panels.data_ptr(),
    )
    return matrix


def _panels(size: int, dtype: torch.dtype, memory: LargePages | None) -> Tensor:
    """Memory for panels of so many elements."""
    return torch.empty(size, dtype=dtype) if memory is None else memory.empty(size, dtype)


def _biases(bias: Tensor | None, outputs: int) -> Tensor | None:
    require(bias is None or bias.shape == (outputs,), "bias", f"be [{outputs}]")
    return None if bias is None else _padded(bias.float())


def _check_groups(codes: Tensor, dtype: torch.dtype, group: int, numbers: Sequence[Tensor | None]) -> None:
    """`numbers` are what each group of an output has."""
    name = str(dtype).removeprefix("torch.")
    is_matrix = codes.ndim == 2 and codes.numel() > 0
    require(is_matrix and codes.dtype == dtype, "weight", f"have codes {name} [outputs, inputs], both above 0")
    require(group in GROUP_SIZES, "weight", "have groups of 16, 32, 64 or 128")
    shape = (len(codes), -(-codes.shape[1] // group))
    fit = all(each is None or each.shape == shape for each in numbers)
    require(fit, "weight", f"have scales and minimums or zero points {list(shape)}")


def linear(thread_pool: ThreadPool, inputs: Tensor, matrix: PackedMatrix) -> Tensor:
    """The float32 products [rows, outputs] of `inputs` [rows, inputs], float32 or bfloat16."""
    kind = type_of(matrix.dtype)
    require(inputs.dtype == matrix.dtype, "inputs", "have the dtype that the matrix is packed for")
    require(inputs.ndim == 2 and inputs.shape[1] == matrix.inputs, "inputs", f"be [rows, {matrix.inputs}]")
    padded = torch.nn.functional.pad(inputs, (0, -inputs.shape[1] % PANEL)).contiguous()
    if padded.shape[1] * padded.element_size() % _PAGE == 0:
        padded = torch.nn.functional.pad(padded, (0, PANEL))
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


def quantize_in_8_bits(weight: Tensor, code_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes int8 [outputs, inputs] and scales float32 [outputs], as `pack_matrix` rounds a weight in 8 bits."""
    known_scales = torch.zeros(len(weight)) if code_scales is None else code_scales
    codes, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        values = weight[rows].float()
        chosen = values.abs().amax(1).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
        scales[rows] = torch.where(known_scales[rows] > 0, known_scales[rows], chosen)
        codes[rows].copy_((values / scales[rows, None]).round_().clamp_(-128, 127))
    return codes, scales


def _split(scales: Tensor, minimums: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_scales`, of both: a power of two for each output serves its scales and minimums."""
    both, factors = split_scales(torch.cat([scales, minimums], 1), factors)
    return both[:, : scales.shape[1]], both[:, scales.shape[1] :], factors


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _padded(row: Tensor) -> Tensor:
    return torch.nn.functional.pad(row, (0, -len(row) % PANEL)).contiguous()
