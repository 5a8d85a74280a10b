"""Keys and values in 8 bits: the codes and scales of a quantized cache.

A vector is code × scale, with one float32 scale for each token slot and KV head, in a tensor beside the cache.
So a token's scale depends on that token alone: it is known when the token is stored, without calibration; no
later token changes it (a scale per block would have to re-quantize what the block holds, which may be shared); and the
same tokens give the same cache however a prompt is cut into chunks. It costs 4 bytes for each head_dim of codes, and
no product: attention folds the scale of a key into its scores, and that of a value into its weights' exponents.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest code. int8 leaves -128 out, so that codes are symmetric.
MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# A vector of smaller values only becomes zeros: its scale would be too small to divide by.
TINY = tl.constexpr(1e-30)


def scale_shape(cache_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the float32 scales beside a cache [..., num_kv_heads, block_size, head_dim]: all but head_dim."""
    return cache_shape[:-1]


@triton.jit  # type: ignore[untyped-decorator]
def encode(b_numbers, b_largest, MAX_CODE: tl.constexpr, code_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of float32 numbers, the largest of which are `b_largest`. int8 rounds halves up, float8 to even."""
    b_codes = b_numbers * (MAX_CODE / tl.maximum(b_largest, TINY))
    if code_dtype == tl.int8:
        b_codes = tl.floor(b_codes + 0.5)
    return b_codes.to(code_dtype)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_rows(b_rows, MAX_CODE: tl.constexpr, code_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes [rows, dims] and scales [rows] of the rows of a tile."""
    b_rows = b_rows.to(tl.float32)
    b_largest = tl.max(tl.abs(b_rows), axis=1)
    return encode(b_rows, b_largest[:, None], MAX_CODE, code_dtype), b_largest / MAX_CODE


def quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in plain torch.

    Args:
        vectors: [..., head_dim], floating point.
        dtype: int8 or float8_e4m3fn.

    Returns:
        codes [..., head_dim] of that dtype, scales [...] in float32.
    """
    vectors = vectors.float()
    largest = vectors.abs().amax(-1)
    max_code = torch.full_like(largest, MAX_CODES[dtype])  # a number / a tensor would be rounded twice
    codes = vectors * (max_code / largest.clamp(min=TINY.value))[..., None]
    if dtype == torch.int8:
        codes = (codes + 0.5).floor()
    return codes.to(dtype), largest / MAX_CODES[dtype]


def dequantize(codes: Tensor, scales: Tensor | None) -> Tensor:
    """The vectors [..., head_dim] in float32; without scales, codes that are the vectors themselves."""
    return codes.float() if scales is None else codes.float() * scales[..., None]
