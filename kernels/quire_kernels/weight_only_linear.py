"""Matrix products with weights in codes of 8 or 4 bits, and inputs as they are: codes become numbers of the inputs'
dtype in the registers of the multiprocessor that multiplies them. Also with the weights of the rows' experts
(`group_by_expert`).

Where there are many rows, the weight's numbers are written to memory first, and multiplied by torch.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._code_words import WORDS, word_codes, word_numbers
from quire_kernels._device import DeviceLimits, device_limits
from quire_kernels._shapes import ceil_div, check_rows, check_vector, next_power_of_2
from quire_kernels._split_sums import MOST_TILES, add_splits, arrivals, choose_splits
from quire_kernels.dequantize_weight import dequantize_weight, group_numbers, split_pairs
from quire_kernels.group_by_expert import ExpertGroups
from quire_kernels.grouped_linear import (
    check_expert_bias,
    check_row_groups,
    choose_tile_rows,
    grouped_products,
    tile_of_rows,
)
from quire_kernels.invariant_linear import store_products
from quire_kernels.weight_only_matrix import WeightOnlyMatrix

_FEW_ROWS, _MANY_ROWS = 16, 64
# Outputs of a tile, and its warps, up to 16 rows and of more rows
_TILES = (64, 4), (64, 8)
# Numbers of e2m1 take more registers than codes: with 64 outputs, warps would spill some.
_TILE_OF_E2M1 = 32, 8
# On Hopper, warps that multiply more outputs each wait less for their sums (H200, Triton 3.6, 4096 to 28672).
_HOPPER_TILES = (64, 2), (128, 4)
# With 64 rows, four warps would spill registers.
_HOPPER_TILE_OF_MANY_ROWS = 128, 8
# Outputs, warps and stages with 64 rows in groups of 32 or 64 with zero points: four warps take 0.072 ms, although they
# spill, and eight 0.103 (groups of 32).
_HOPPER_TILE_OF_MANY_SUMS = 128, 4, 2
# Groups of fewer inputs were not measured.
_HOPPER_TILES_OF_SMALL_GROUPS = (64, 4), (128, 8)
# In float32, whose products take more registers
_EXACT_TILE = 32, 8
# Where shared memory is small
_NARROW_OUTPUTS = 32
# Rows beyond which it takes less time to write the weight's numbers and multiply those (H200, 4096 to 28672).
_MOST_ROWS = {4: 64, 8: 128}


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _weight_only_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_words,
    p_factors,
    p_pairs,
    p_minimum_factors,
    p_bias,
    p_order,
    p_tile_experts,
    p_parts,
    p_arrivals,
    num_rows,
    stride_output,
    stride_inputs,
    stride_expert,
    stride_words,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS_PER_INPUT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    RUNS_PTX: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The weight is the left operand, which tensor cores take from registers, where its codes become numbers: sums are
    [TILE_N, TILE_M].
    """
    # Tiles of rows are neighbours in a launch, so that each tile of the weight comes from memory once
    o_row, m_row, expert = tile_of_rows(p_order, p_tile_experts, num_rows, TILE_M)
    if expert < 0:
        return
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_output = o_output < OUTPUTS
    dtype: tl.constexpr = p_inputs.dtype.element_ty
    o_word = tl.arange(0, WORDS)
    p_row = p_inputs + (o_row // ROWS_PER_INPUT)[None, :] * stride_inputs
    p_column = p_words + expert * stride_expert + o_output.to(tl.int64)[:, None] * stride_words + o_word[None, :]
    p_factors += expert * OUTPUTS
    if p_bias is not None:
        p_bias += expert * OUTPUTS
    if GROUP is not None:
        p_pairs += expert * GROUPS * OUTPUTS
    b_factors = tl.load(p_factors + o_output, mask=m_output, other=0.0)
    b_minimum_factors = None
    if p_minimum_factors is not None:
        p_minimum_factors += expert * OUTPUTS
        b_minimum_factors = tl.load(p_minimum_factors + o_output, mask=m_output, other=0.0)
    # A block of words has a plane for each code of a word, of as many neighbouring inputs as it has words.
    PLANES: tl.constexpr = 32 // BITS
    PLANES_OF_GROUP: tl.constexpr = 1 if GROUP is None else (GROUP + WORDS - 1) // WORDS
    BLOCKS: tl.constexpr = (INPUTS + PLANES * WORDS - 1) // (PLANES * WORDS)
    BLOCKS_EACH: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    first_block = tl.program_id(2) * BLOCKS_EACH
    b_sum = tl.zeros([TILE_N, TILE_M], tl.float32)
    for block in range(first_block, tl.minimum(first_block + BLOCKS_EACH, BLOCKS)):
        # [TILE_N, WORDS]
        b_words = tl.load(p_column + block * WORDS, mask=m_output[:, None], other=0)
        b_part = b_sum
        b_input_sum = tl.zeros([TILE_M], tl.float32)
        for plane in tl.static_range(PLANES):
            first = (block * PLANES + plane) * WORDS
            o_input = first + o_word
            # [WORDS, TILE_M]
            b_inputs = tl.load(p_row + o_input[:, None], mask=m_row[None, :] & (o_input < INPUTS)[:, None], other=0.0)
            if GROUP is None:
                b_numbers = word_numbers(b_words, None, plane, BITS, IS_E2M1, dtype, RUNS_PTX)
                b_sum = tl.dot(b_numbers, b_inputs, b_sum, input_precision="ieee")
            elif GROUP >= WORDS:
                # Zero points are taken from codes, scales and minimums are those of a group's sums.
                if plane % PLANES_OF_GROUP == 0:
                    group = first // GROUP
                    b_pairs = tl.load(p_pairs + group * OUTPUTS + o_output, mask=m_output & (group < GROUPS), other=0)
                    b_scales, b_seconds = split_pairs(b_pairs)
                    b_part = tl.zeros([TILE_N, TILE_M], tl.float32)
                    b_input_sum = tl.zeros([TILE_M], tl.float32)
                b_zeros = b_seconds if HAS_ZEROS else None
                b_numbers = word_numbers(b_words, b_zeros, plane, BITS, IS_E2M1, dtype, RUNS_PTX)
                b_part = tl.dot(b_numbers, b_inputs, b_part, input_precision="ieee")
                if b_minimum_factors is not None:
                    b_input_sum += tl.sum(b_inputs.to(tl.float32), axis=0)
                if plane % PLANES_OF_GROUP == PLANES_OF_GROUP - 1:
                    b_sum += b_part * (b_scales * b_factors)[:, None]
                    if b_minimum_factors is not None:
                        b_sum += (b_seconds * b_minimum_factors)[:, None] * b_input_sum[None, :]
            else:
                o_group = (o_input // GROUP)[None, :] * OUTPUTS + o_output[:, None]
                m_group = m_output[:, None] & (o_input < INPUTS)[None, :]
                b_pairs = tl.load(p_pairs + o_group, mask=m_group, other=0)
                b_numbers = group_numbers(
                    word_codes(b_words, plane, BITS, IS_E2M1),
                    b_pairs,
                    b_factors[:, None],
                    None if b_minimum_factors is None else b_minimum_factors[:, None],
                    HAS_ZEROS,
                )
                b_sum = tl.dot(b_numbers.to(dtype), b_inputs, b_sum, input_precision="ieee")
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        b_sum, is_last = add_splits(b_sum, p_parts, p_arrivals, tile, tl.program_id(2), SPLITS, TILE_N, TILE_M)
        if not is_last:
            return
    if GROUP is None:
        b_sum *= b_factors[:, None]
    store_products(tl.trans(b_sum), p_output, p_bias, o_row, m_row, o_output, m_output, stride_output)


def weight_only_linear(
    inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """`inputs` times the weight's transpose, and the bias added; sums are float32 and rounded once.

    Codes are multiplied as they are, and sums of groups are scaled. Numbers in groups of 16, and all numbers where
    there are many rows, are rounded to the dtype of `inputs` before they are multiplied.

    Args:
        inputs: [rows, inputs], last dimension contiguous.
        bias: [outputs] of the same dtype, contiguous; None for none.
        deterministic: a row comes to the same bits, however many there are.

    Returns:
        [rows, outputs], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(inputs, weight, bias)
    num_rows, outputs = len(inputs), len(weight.words)
    if num_rows > _MOST_ROWS[weight.bits] and not deterministic and inputs.dtype != torch.float32:
        return F.linear(inputs, dequantize_weight(weight, inputs.dtype), bias)
    out = torch.empty((num_rows, outputs), dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out
    _launch(out, inputs, weight, bias, None, _choose_tile_rows(num_rows, inputs, deterministic=deterministic))
    return out


def grouped_weight_only_linear(
    inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int, bias: Tensor | None = None
) -> Tensor:
    """Each row times the transpose of its expert's weight, and its bias added, as `weight_only_linear` does with a few.

    Args:
        inputs: [num_inputs, inputs], last dimension contiguous. Row r reads input r // (num_rows / num_inputs).
        weight: of experts.
        groups: of the rows, in tiles of at least 16.
        num_rows: a multiple of num_inputs.
        bias: [experts, outputs] of the dtype of `inputs`, contiguous; None for none.

    Returns:
        [num_rows, outputs], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype, stride or device.
    """
    out = _grouped_output(inputs, weight, groups, num_rows, bias)
    if out.numel():
        _launch(out, inputs, weight, bias, groups, groups.tile_rows)
    return out


def _launch(
    out: Tensor,
    inputs: Tensor,
    weight: WeightOnlyMatrix,
    bias: Tensor | None,
    groups: ExpertGroups | None,
    tile_rows: int,
) -> None:
    outputs, limits = out.shape[1], device_limits(out.device)
    tile_n, num_warps, num_stages = _choose_tile(weight, inputs.dtype, tile_rows, limits)
    num_columns = ceil_div(outputs, tile_n)
    # Not by the number of rows, so that in tiles of one size they come to the same bits
    splits = 1
    if groups is None:
        splits = choose_splits(num_columns, weight.words.shape[-1] // WORDS, limits.multiprocessors)
    most_rows = MOST_TILES // num_columns * tile_rows if splits > 1 else len(out)
    for first in range(0, len(out), most_rows):
        some, read = out[first : first + most_rows], inputs[first:]
        num_rows = len(some)
        num_tiles = ceil_div(num_rows, tile_rows) if groups is None else len(groups.tile_experts)
        parts = arrived = None
        if splits > 1:
            size = num_tiles * num_columns * splits * tile_rows * tile_n
            parts, arrived = torch.empty(size, dtype=torch.float32, device=out.device), arrivals(out.device)
        _weight_only_linear_kernel[(num_tiles, num_columns, splits)](
            some,
            read,
            weight.words,
            weight.scales,
            weight.pairs,
            weight.minimum_factors,
            bias,
            None if groups is None else groups.order,
            None if groups is None else groups.tile_experts,
            parts,
            arrived,
            num_rows,
            out.stride(0),
            inputs.stride(0),
            0 if groups is None else weight.words.stride(0),
            weight.words.stride(-2),
            OUTPUTS=outputs,
            INPUTS=weight.inputs,
            ROWS_PER_INPUT=1 if groups is None else num_rows // len(inputs),
            GROUPS=weight.num_groups,
            GROUP=weight.group,
            BITS=weight.bits,
            HAS_ZEROS=weight.has_zeros,
            IS_E2M1=weight.is_e2m1,
            RUNS_PTX=limits.runs_ptx,
            SPLITS=splits,
            TILE_M=tile_rows,
            TILE_N=tile_n,
            WORDS=WORDS,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def _choose_tile_rows(num_rows: int, inputs: Tensor, *, deterministic: bool) -> int:
    if deterministic or inputs.dtype == torch.float32 or not device_limits(inputs.device).is_hopper:
        return choose_tile_rows(num_rows, 1, inputs.dtype, deterministic=deterministic)
    return min(max(_FEW_ROWS, next_power_of_2(num_rows)), _MANY_ROWS)


def _choose_tile(
    weight: WeightOnlyMatrix, dtype: torch.dtype, tile_rows: int, limits: DeviceLimits
) -> tuple[int, int, int]:
    """The outputs of a tile, num_warps, and num_stages of the loop over blocks: all but one have a block in shared
    memory.
    """
    # These also have pairs for each few codes there, since the numbers that are multiplied come from both.
    has_small_groups = weight.group is not None and weight.group < WORDS

    def fitting(tile_n: int) -> int:
        plane_bytes = tile_rows * dtype.itemsize + 4 * tile_n * has_small_groups
        return limits.shared_memory // (WORDS * (4 * tile_n + 32 // weight.bits * plane_bytes))

    has_more_rows = tile_rows > _FEW_ROWS
    if dtype == torch.float32:
        tile_n, num_warps = _EXACT_TILE
    elif not limits.is_hopper:
        tile_n, num_warps = _TILE_OF_E2M1 if weight.is_e2m1 and has_more_rows else _TILES[has_more_rows]
    elif has_small_groups:
        tile_n, num_warps = _HOPPER_TILES_OF_SMALL_GROUPS[has_more_rows]
    elif tile_rows < _MANY_ROWS:
        tile_n, num_warps = _HOPPER_TILES[has_more_rows]
    elif weight.has_zeros and weight.group in (WORDS, 2 * WORDS):
        return _HOPPER_TILE_OF_MANY_SUMS
    else:
        tile_n, num_warps = _HOPPER_TILE_OF_MANY_ROWS
    if not fitting(tile_n):
        tile_n = _NARROW_OUTPUTS
    return tile_n, num_warps, 1 + min(1 if has_small_groups else 2, fitting(tile_n))


def weight_only_linear_reference(inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None = None) -> Tensor:
    """`weight_only_linear` in plain torch."""
    _check(inputs, weight, bias)
    numbers = weight.dense()
    if weight.group is not None and weight.group < WORDS:
        numbers = numbers.to(inputs.dtype).float()
    return F.linear(inputs.float(), numbers, None if bias is None else bias.float()).to(inputs.dtype)


def grouped_weight_only_linear_reference(
    inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int, bias: Tensor | None = None
) -> Tensor:
    """`grouped_weight_only_linear` in plain torch, tile by tile."""
    out = _grouped_output(inputs, weight, groups, num_rows, bias)

    def multiply(expert: int, input_rows: Tensor) -> Tensor:
        of_expert = None if bias is None else bias[expert]
        return weight_only_linear_reference(inputs[input_rows], weight.of_expert(expert), of_expert)

    return grouped_products(groups, len(inputs), num_rows, out, multiply)


def _grouped_output(
    inputs: Tensor, weight: WeightOnlyMatrix, groups: ExpertGroups, num_rows: int, bias: Tensor | None
) -> Tensor:
    """Memory for the result, if all is well."""
    require(weight.words.ndim == 3 and len(weight.words) > 0, "weight", "be of experts")
    _check(inputs, weight.of_expert(0), None)
    check_row_groups(groups, num_rows, inputs)
    num_experts, outputs = weight.words.shape[:2]
    check_expert_bias(bias, (num_experts, outputs), inputs.dtype, inputs.device)
    return torch.empty((num_rows, outputs), dtype=inputs.dtype, device=inputs.device)


def _check(inputs: Tensor, weight: WeightOnlyMatrix, bias: Tensor | None) -> None:
    check_rows(inputs, "inputs", FLOAT_DTYPES)
    weight.check()
    device, outputs = weight.words.device, len(weight.words)
    require(inputs.device == device, "inputs", f"be on {device}")
    require(inputs.shape[1] == weight.inputs, "inputs", f"be {weight.inputs} wide")
    if bias is not None:
        check_vector(bias, "bias", outputs, inputs.dtype, device)
