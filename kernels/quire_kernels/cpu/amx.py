"""Products by the tile registers of AMX, whose factors are bfloat16: a float32 factor is the sum of two of them.

So a float32 product has 16 bits of precision of its factors' 24.
"""

from ctypes import byref

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire_kernels._checks import require
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, pack_matrix
from quire_kernels.cpu.thread_pool import ThreadPool, type_of

# Inputs of a tile.
DEPTH = 32


def has_amx(thread_pool: ThreadPool) -> bool:
    """Whether the processor has the registers, and the system lets this process use them."""
    return bool(thread_pool.library.quire_has_amx())


def arithmetic_of(thread_pool: ThreadPool) -> str:
    """A name of what the bits of compiled results depend on, besides weights and dtype."""
    return f"compiled {thread_pool.library_name} {'with' if has_amx(thread_pool) else 'without'} AMX"


def amx_input_multiple(matrix_format: MatrixFormat) -> int:
    """What the inputs of a matrix are padded to a multiple of."""
    return 1 if matrix_format.takes_codes else DEPTH


def pack_for_amx(
    thread_pool: ThreadPool,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    matrix_format: MatrixFormat = MatrixFormat.PLAIN,
    memory: LargePages | None = None,
    code_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> PackedMatrix:
    """Lays out a weight [outputs, inputs] of float32 or bfloat16 in blocks of 32 inputs, and a bias [outputs]. `dtype`
    is that of the inputs, as in `pack_matrix`.

    Of float32, each block has the values rounded to bfloat16, and then the rest, rounded too; 8 and 4 bits, as in
    `pack_matrix`, are for bfloat16. Formats whose inputs are rounded to 8 bits are laid out as by `pack_matrix`.
    Raises ValueError where a format, or another dtype, is not possible.
    """
    dtype = dtype or weight.dtype
    type_of(dtype)
    if dtype == torch.float32:
        require(matrix_format is MatrixFormat.PLAIN, "matrix_format", "be PLAIN for float32")
        blocks = pad(weight, (0, -weight.shape[1] % DEPTH)).view(len(weight), -1, DEPTH)
        high = blocks.bfloat16()
        weight, dtype = torch.stack([high, (blocks - high.float()).bfloat16()], dim=2).flatten(1), torch.bfloat16
    return pack_matrix(
        thread_pool,
        weight,
        bias,
        matrix_format=matrix_format,
        memory=memory,
        input_multiple=amx_input_multiple(matrix_format),
        code_scales=code_scales,
        dtype=dtype,
    )


def amx_linear(thread_pool: ThreadPool, inputs: Tensor, matrix: PackedMatrix) -> Tensor:
    """The float32 products [rows, outputs] of `inputs` [rows, inputs] and a weight that was packed in their dtype."""
    kind = type_of(inputs.dtype)
    require(has_amx(thread_pool), "thread_pool", "be on a processor with AMX")
    rows = pad(inputs.float(), (0, -inputs.shape[1] % DEPTH)).contiguous()
    num_parts = 2 if inputs.dtype == torch.float32 else 1
    num_inputs = inputs.shape[1] if matrix.matrix_format.takes_codes else num_parts * rows.shape[1]
    require(num_inputs == matrix.inputs, "inputs", "be those of the matrix")
    require(matrix.order is None, "matrix", "have its inputs in order")
    output = torch.empty(len(rows), matrix.outputs)
    thread_pool.library.quire_amx_linear(
        thread_pool.handle,
        kind,
        byref(matrix.args()),
        rows.data_ptr(),
        len(rows),
        rows.shape[1],
        output.data_ptr(),
    )
    return output
