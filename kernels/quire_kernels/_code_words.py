"""Codes of 4 and 8 bits as operands of tensor cores, from words of 32 bits that hold eight or four of them each.

Of neighbouring words one code each becomes a pair of float16 or bfloat16, which hold every code exactly.
"""

import triton
import triton.language as tl

WORDS = 32
"""Words of a block of inputs: word j has the inputs j, 32 + j, 64 + j and so on, from its lowest bits on."""


def integer_ptx(bits: int, plane: int, *, is_bfloat16: bool, has_zeros: bool) -> str:
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


def e2m1_ptx(plane: int, *, is_bfloat16: bool) -> str:
    """For two words, $1 and $2: twice the numbers of their codes of e2m1 of a plane as a pair, $0.

    A code is a sign, two bits of exponent and one of mantissa. With the last three at the lowest bits of the exponent
    and the highest one of the mantissa, it is the float16 number x 2 ** -14, or the bfloat16 number x 2 ** -126, also
    where the exponent is 0. 0x7800 is the float16 2 ** 15, and 0x7F00 the bfloat16 2 ** 127. lop3 by 0xEA is
    (a & b) | c.
    """
    place, first = 4 * (plane % 4), 6 if is_bfloat16 else 9
    magnitudes, factor = ("0x01C001C0", "0x7F007F00") if is_bfloat16 else ("0x0E000E00", "0x78007800")
    multiply = "fma.rn.bf16x2 $0, t, factor, zero;" if is_bfloat16 else "mul.rn.f16x2 $0, t, factor;"
    lines = (
        f".reg .b32 t, sign, factor, zero; mov.b32 factor, {factor}; mov.b32 zero, 0;",
        f"prmt.b32 t, $1, $2, {'0x7632' if plane >= 4 else '0x5410'};",
        f"shl.b32 sign, t, {12 - place};",
        "and.b32 sign, sign, 0x80008000;",
        f"{'shl' if first >= place else 'shr'}.b32 t, t, {abs(first - place)};",
        f"lop3.b32 t, t, {magnitudes}, sign, 0xEA;",
        multiply,
    )
    return "\n".join(("{", *lines, "}"))


_PTX = {
    (bits, plane, is_bfloat16, has_zeros): integer_ptx(bits, plane, is_bfloat16=is_bfloat16, has_zeros=has_zeros)
    for bits in (4, 8)
    for plane in range(32 // bits)
    for is_bfloat16 in (False, True)
    for has_zeros in (False, True)[: 1 + (bits == 4)]
}
_E2M1_PTX = {
    (plane, is_bfloat16): e2m1_ptx(plane, is_bfloat16=is_bfloat16)
    for plane in range(8)
    for is_bfloat16 in (False, True)
}


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _ptx_of(bits: int, plane: int, is_bfloat16: bool, has_zeros: bool, is_e2m1: bool) -> str:
    return _E2M1_PTX[plane, is_bfloat16] if is_e2m1 else _PTX[bits, plane, is_bfloat16, has_zeros]


@triton.jit  # type: ignore[untyped-decorator]
def word_numbers(  # type: ignore[no-untyped-def]
    b_words,
    b_zeros,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    dtype: tl.constexpr,
    RUNS_PTX: tl.constexpr,
):
    """The codes [outputs, WORDS] of a plane of words, less zero points [outputs] of 4 bits or None, in float32, float16
    or bfloat16. IS_E2M1: twice the numbers of codes of e2m1, without zero points. RUNS_PTX: by instructions of NVIDIA's
    GPUs, 3 for each code or fewer.
    """
    HAS_ZEROS: tl.constexpr = b_zeros is not None
    if RUNS_PTX and dtype == tl.bfloat16:
        to_bfloat16: tl.constexpr = _ptx_of(BITS, PLANE, True, HAS_ZEROS, IS_E2M1)
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
        to_float16: tl.constexpr = _ptx_of(BITS, PLANE, False, HAS_ZEROS, IS_E2M1)
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
        b_codes = word_codes(b_words, PLANE, BITS, IS_E2M1).to(tl.float32)
        if b_zeros is not None:
            b_codes -= b_zeros[:, None]
        b_numbers = b_codes.to(dtype)
    return b_numbers


@triton.jit  # type: ignore[untyped-decorator]
def word_codes(  # type: ignore[no-untyped-def]
    b_words, PLANE: tl.constexpr, BITS: tl.constexpr, IS_E2M1: tl.constexpr
):
    """The codes of a plane as int32: unsigned of 4 bits, or int8. IS_E2M1: twice the numbers of codes of e2m1, in
    float16.
    """
    if BITS == 8:
        # A shift to the left and one back leave the sign.
        b_codes = (b_words << (24 - 8 * PLANE)) >> 24
    else:
        b_codes = (b_words >> (4 * PLANE)) & 15
        if IS_E2M1:
            # As in e2m1_ptx
            b_bits = ((b_codes & 7) << 9) | ((b_codes & 8) << 12)
            b_codes = b_bits.to(tl.int16).to(tl.float16, bitcast=True) * 32768.0
    return b_codes
