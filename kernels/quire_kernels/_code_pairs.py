"""Codes of 8 bits as float16, read two at a time: the codes of dimensions 2i and 2i + 1 of a vector are one int16.

float16 holds every code of int8 and of float8_e4m3fn exactly, and codes become float16 in 1.25 instructions each or
fewer; bfloat16 takes 2 at least. Tensor cores take operands of 16 bits, so that loads of pairs are those of a cache in
16 bits: single codes of values would be read from shared memory byte by byte.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import PagedKV
from quire_kernels._device import device_limits
from quire_kernels._shapes import next_power_of_2

Unpacking = Literal["ptx", "portable", "single"]
"""How pairs are converted: by instructions of NVIDIA's GPUs on two pairs at a time, or by Triton's operations.

With "single", codes are read one by one, on an NVIDIA GPU.
"""

# Two dots of half a vector each: tl.dot wants 16 dimensions at least.
_LEAST_DIMS = 32
_FEW_ROWS, _MOST_DIMS = 16, 128

# $2 holds two pairs. An int8 code plus 128 is the low byte of the float16 1024 + 128 + code, whose high byte is 0x64;
# 0x6480 is 1152.
INT8_PTX = tl.constexpr("""{
    .reg .b32 t, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 t, $2, 0x80808080;
    prmt.b32 $0, t, 0x64646464, 0x4240;
    prmt.b32 $1, t, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
}""")
FP8_PTX = tl.constexpr("""{
    .reg .b32 t;
    .reg .b16 even, odd;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {even, odd}, t;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit  # type: ignore[untyped-decorator]
def unpack_pairs(b_pairs, IS_INT8: tl.constexpr, UNPACKING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of even and of odd dimensions, two tiles in float16 of the shape of the int16 `b_pairs`."""
    if UNPACKING == "ptx":
        if IS_INT8:
            b_even, b_odd = tl.inline_asm_elementwise(
                INT8_PTX, "=r,=r,r", [b_pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            b_even, b_odd = tl.inline_asm_elementwise(
                FP8_PTX, "=r,=r,r", [b_pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
    elif IS_INT8:
        # As in INT8_PTX
        b_even = (((b_pairs & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        b_odd = ((((b_pairs >> 8) & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        # Sign, exponent and mantissa in their places. The exponent's bias is 7, but 15 in float16: times 2 ** 8
        b_even = (((b_pairs << 8) & -0x8000) | ((b_pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        b_odd = ((b_pairs & -0x8000) | ((b_pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
    return b_even, b_odd


@triton.jit  # type: ignore[untyped-decorator]
def log_and_inverse(b_scale, UNPACKING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The base-2 logarithms of scales, which are no denormals, and their inverses, to 21 bits at least. Triton's own
    take some thirty instructions on an NVIDIA GPU.
    """
    if UNPACKING is not None and UNPACKING != "portable":
        b_log, b_inverse = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;",
            "=&f,=f,f",
            [b_scale],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        b_log, b_inverse = tl.log2(b_scale), 1.0 / b_scale
    return b_log, b_inverse


@triton.jit  # type: ignore[untyped-decorator]
def halve_rows(b_rows, ROWS: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even and the odd dimensions of rows [ROWS, DIMS] in float16, and the factor [ROWS] of each row.

    A row is divided by a power of two, so that its largest number is from 1 to 2: float16 then holds what bfloat16
    does, except for numbers below 2 ** -14 of the largest, which lose digits beyond the 24th of the largest.
    """
    b_rows = b_rows.to(tl.float32)
    # The exponent of float32 alone is a power of two, and 254 minus it that of the inverse
    b_exponent = tl.max(tl.abs(b_rows), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    b_inverse = (0x7F000000 - b_exponent).to(tl.float32, bitcast=True)
    b_even, b_odd = tl.split(tl.reshape(b_rows * b_inverse[:, None], [ROWS, DIMS // 2, 2]))
    return b_even.to(tl.float16), b_odd.to(tl.float16), b_exponent.to(tl.float32, bitcast=True)


def unpacking(query: Tensor, kv: PagedKV, tile_m: int) -> Unpacking | None:
    """How a kernel of tiles of `tile_m` rows converts a cache's codes; None: one by one, or the cache has none."""
    if kv.key_scales is None:
        return None
    head_dim, runs_ptx = query.shape[2], device_limits(query.device).runs_ptx
    is_even = head_dim % 2 == 0 and all(stride % 2 == 0 for stride in kv.key_cache.stride()[:3])
    tile_d = next_power_of_2(head_dim)
    # With many rows of the widest heads, pairs would spill registers (ptxas for sm_90).
    fits = tile_d >= _LEAST_DIMS and (tile_m <= _FEW_ROWS or tile_d <= _MOST_DIMS)
    if query.dtype == torch.float32 or not is_even or not fits:
        return "single" if runs_ptx else None
    return "ptx" if runs_ptx else "portable"
