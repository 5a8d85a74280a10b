"""Codes of 4 and 8 bits as operands of tensor cores, from words of 32 bits that hold eight or four of them each.

Of neighbouring words one code each becomes a pair of float16 or bfloat16, which hold every code exactly.
"""

import triton
import triton.language as tl

WORDS = 32
"""Words of a block of inputs: word j has the inputs j, 32 + j, 64 + j and so on, from its lowest bits on."""


def _ptx(bits: int, plane: int, *, is_bfloat16: bool, has_zeros: bool) -> str:
    """For two words, $1 and $2: their codes of a plane as a pair, $0.

    A code of 4 bits is in the lowest bits of the bfloat16 128 + code (0x43 above it) and of the float16 1024 + code
    (0x64); $3 is minus 128 or 1024, and minus a zero point. A code of int8 is its lowest 7 bits, minus 128 where its
    sign is set: as bfloat16 (128 + lowest bits) - (128 + sign bit). That plus 128 is in the lowest 8 bits of the
    float16 1024 + 128 + code. 0xC300 is -128, 0x3F80 is 1, and 0xE480 is -1152. lop3 by 0xEA is (a & b) | c, by 0x6A
    (a & b) ^ c. sm_80 has fma of bfloat16, but no add.
    """
    if bits == 4:
        bias = "0xC300C300" if is_bfloat16 else "0xE400E400"
        lines = [
            f"prmt.b32 t, $1, $2, {'0x7632' if plane >= 4 else '0x5410'};",
            *([f"shr.b32 t, t, {4 * (plane % 4)};"] if plane % 4 else []),
            f"lop3.b32 t, t, 0x000F000F, {'0x43004300' if is_bfloat16 else '0x64006400'}, 0xEA;",
        ]
    else:
        bias = "0xE480E480"
        beside = plane ^ 1  # any other byte
        lines = [f"prmt.b32 t, $1, $2, 0x{beside + 4}{plane + 4}{beside}{plane};"]
        if is_bfloat16:
            lines.append("lop3.b32 bias, t, 0x00800080, 0xC300C300, 0xEA;")
            lines.append("lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;")
        else:
            lines.append("lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A;")
    add = "fma.rn.bf16x2 $0, t, one," if is_bfloat16 else "add.rn.f16x2 $0, t,"
    head = f".reg .b32 t, one, bias; mov.b32 one, 0x3F803F80; mov.b32 bias, {bias};"
    return "\n".join(("{", head, *lines, f"{add} {'$3' if has_zeros else 'bias'};", "}"))


_PTX = {
    (bits, plane, is_bfloat16, has_zeros): _ptx(bits, plane, is_bfloat16=is_bfloat16, has_zeros=has_zeros)
    for bits in (4, 8)
    for plane in range(32 // bits)
    for is_bfloat16 in (False, True)
    for has_zeros in (False, True)[: 1 + (bits == 4)]
}


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _ptx_of(bits: int, plane: int, is_bfloat16: bool, has_zeros: bool) -> str:
    return _PTX[bits, plane, is_bfloat16, has_zeros]


@triton.jit  # type: ignore[untyped-decorator]
def word_numbers(  # type: ignore[no-untyped-def]
    b_words, b_zeros, PLANE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, RUNS_PTX: tl.constexpr
):
    """The codes [outputs, WORDS] of a plane of words, less zero points [outputs] of 4 bits or None, in float32, float16
    or bfloat16. RUNS_PTX: by instructions of NVIDIA's GPUs, 2 for each code or fewer.
    """
    HAS_ZEROS: tl.constexpr = b_zeros is not None
    if RUNS_PTX and dtype == tl.bfloat16:
        to_bfloat16: tl.constexpr = _ptx_of(BITS, PLANE, True, HAS_ZEROS)
        if HAS_ZEROS:
            b_bias = tl.broadcast_to((-128.0 - b_zeros).to(tl.bfloat16)[:, None], b_words.shape)
            b_numbers = tl.inline_asm_elementwise(
                to_bfloat16, "=r,r,r,r", [b_words, b_bias], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            b_numbers = tl.inline_asm_elementwise(
                to_bfloat16, "=r,r,r", [b_words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    elif RUNS_PTX and dtype == tl.float16:
        to_float16: tl.constexpr = _ptx_of(BITS, PLANE, False, HAS_ZEROS)
        if HAS_ZEROS:
            b_bias = tl.broadcast_to((-1024.0 - b_zeros).to(tl.float16)[:, None], b_words.shape)
            b_numbers = tl.inline_asm_elementwise(
                to_float16, "=r,r,r,r", [b_words, b_bias], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            b_numbers = tl.inline_asm_elementwise(
                to_float16, "=r,r,r", [b_words], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        b_codes = word_codes(b_words, PLANE, BITS).to(tl.float32)
        if b_zeros is not None:
            b_codes -= b_zeros[:, None]
        b_numbers = b_codes.to(dtype)
    return b_numbers


@triton.jit  # type: ignore[untyped-decorator]
def word_codes(b_words, PLANE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of a plane as int32: unsigned of 4 bits, or int8."""
    # A shift to the left and one back leave the sign.
    return (b_words >> (4 * PLANE)) & 15 if BITS == 4 else (b_words << (24 - 8 * PLANE)) >> 24
