"""A matrix product of each head with weights of its own, as latent attention has before and after its scores.

As in `invariant_linear`, a token's bits do not depend on the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import FLOAT_DTYPES, require
from quire_kernels._device import pipeline_stages
from quire_kernels._shapes import ceil_div

# Tokens, outputs and inputs of a tile. Fewer of float32, whose products run without tensor cores.
_TILES, _TILES_EXACT = (64, 64, 64), (32, 32, 32)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _head_linear_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_inputs,
    p_weight,
    num_tokens,
    stride_output_token,
    stride_output_head,
    stride_inputs_token,
    stride_inputs_head,
    stride_weight_head,
    stride_weight_output,
    stride_weight_input,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # Tiles of tokens are neighbours in a launch, so that each tile of the weight comes from memory once
    o_token = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    o_output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    head = tl.program_id(2).to(tl.int64)
    m_token = o_token < num_tokens
    m_output = o_output < OUTPUTS
    p_token = p_inputs + head * stride_inputs_head + o_token[:, None] * stride_inputs_token
    p_column = p_weight + head * stride_weight_head + o_output[:, None] * stride_weight_output
    b_sum = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, INPUTS, TILE_K):
        o_input = start + tl.arange(0, TILE_K)
        m_input = o_input < INPUTS
        # [TILE_M, TILE_K]
        b_inputs = tl.load(p_token + o_input[None, :], mask=m_token[:, None] & m_input[None, :], other=0.0)
        # [TILE_N, TILE_K]
        o_weight = o_input[None, :] * stride_weight_input
        b_weight = tl.load(p_column + o_weight, mask=m_output[:, None] & m_input[None, :], other=0.0)
        b_sum = tl.dot(b_inputs, tl.trans(b_weight), b_sum, input_precision="ieee")
    # [TILE_M, TILE_N]
    o_out = head * stride_output_head + o_token[:, None] * stride_output_token + o_output[None, :]
    tl.store(p_output + o_out, b_sum.to(p_output.dtype.element_ty), mask=m_token[:, None] & m_output[None, :])


def head_linear(inputs: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Each head's inputs times the transpose of its weight; sums are float32 and rounded once.

    Args:
        inputs: [num_tokens, num_heads, in_features], last dimension contiguous.
        weight: [num_heads, out_features, in_features] of the dtype of `inputs`, of any strides.
        out: the output to write: [num_tokens, num_heads, out_features], last dimension contiguous.

    Returns:
        `out`, or else [num_tokens, num_heads, out_features], contiguous, of the dtype of `inputs`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    _check(inputs, weight, out)
    num_tokens, num_heads, in_features = inputs.shape
    out_features = weight.shape[1]
    if out is None:
        out = torch.empty((num_tokens, num_heads, out_features), dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out
    tile_m, tile_n, tile_k = _TILES_EXACT if inputs.dtype == torch.float32 else _TILES
    _head_linear_kernel[(ceil_div(num_tokens, tile_m), ceil_div(out_features, tile_n), num_heads)](
        out,
        inputs,
        weight,
        num_tokens,
        out.stride(0),
        out.stride(1),
        inputs.stride(0),
        inputs.stride(1),
        *weight.stride(),
        OUTPUTS=out_features,
        INPUTS=in_features,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=4,
        num_stages=pipeline_stages((tile_m + tile_n) * tile_k * inputs.dtype.itemsize, inputs.device),
    )
    return out


def head_linear_reference(inputs: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`head_linear` in plain torch."""
    _check(inputs, weight, out)
    product = torch.einsum("thk,hnk->thn", inputs.float(), weight.float()).to(inputs.dtype)
    return product if out is None else out.copy_(product)


def _check(inputs: Tensor, weight: Tensor, out: Tensor | None) -> None:
    require(inputs.ndim == 3, "inputs", "be [num_tokens, num_heads, in_features]")
    require(inputs.dtype in FLOAT_DTYPES, "inputs", "be float32, float16 or bfloat16")
    require(inputs.stride(2) == 1, "inputs", "be contiguous in its last dimension")
    num_tokens, num_heads, in_features = inputs.shape
    fits = weight.ndim == 3 and weight.shape[0] == num_heads and weight.shape[2] == in_features
    require(fits, "weight", f"be [{num_heads}, out_features, {in_features}]")
    require(weight.dtype == inputs.dtype, "weight", "have the dtype of inputs")
    require(weight.device == inputs.device, "weight", f"be on {inputs.device}")
    if out is not None:
        shape = num_tokens, num_heads, weight.shape[1]
        require(tuple(out.shape) == shape, "out", f"have shape {list(shape)}")
        require(out.dtype == inputs.dtype, "out", "have the dtype of inputs")
        require(out.stride(2) == 1, "out", "be contiguous in its last dimension")
        require(out.device == inputs.device, "out", f"be on {inputs.device}")
