"""Attention within whole prompts, in both directions and without a cache, as encoders have it."""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._attend import LOWEST, load_rows, score_parameters, tile_dims, tile_keys
from quire_kernels._checks import MAX_PROMPT_HEAD_DIM, require, wider_heads
from quire_kernels._device import device_limits
from quire_kernels._shapes import check_rows, check_vector
from quire_kernels.paged_attention import find_tile

# Rows of queries of a tile: the fewest that fill Hopper's matrix instruction, as most texts are short. Fewer of
# float32, whose products run without tensor cores.
_QUERIES, _QUERIES_EXACT = 64, 32
_MOST_KEYS = 64  # of a tile


@triton.jit(  # type: ignore[untyped-decorator]
    # It differs from step to step: one program must serve all
    do_not_specialize=["num_prompts"],
)
def _prompt_attention_kernel(  # type: ignore[no-untyped-def]
    p_output,
    p_qkv,
    p_starts,
    num_prompts,
    score_scale,
    stride_output,
    stride_qkv,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # Heads are neighbours in a launch, since their keys are side by side in memory
    head, tile = tl.program_id(0), tl.program_id(1)
    prompt, first_query = find_tile(p_starts, num_prompts, tile, TILE_M)
    start = tl.load(p_starts + prompt)
    length = tl.load(p_starts + prompt + 1) - start
    if first_query >= length:
        return
    o_dim = tl.arange(0, TILE_D)
    m_dim = o_dim < HEAD_DIM
    o_column = head * HEAD_DIM + o_dim
    o_query = first_query + tl.arange(0, TILE_M)
    m_query = (o_query < length)[:, None] & m_dim[None, :]
    o_token = (start + o_query).to(tl.int64)
    # [TILE_M, TILE_D]
    b_query = tl.load(p_qkv + o_token[:, None] * stride_qkv + o_column[None, :], mask=m_query, other=0.0)

    b_max = tl.full([TILE_M], LOWEST, tl.float32)
    b_sum = tl.zeros([TILE_M], tl.float32)
    b_output = tl.zeros([TILE_M, TILE_D], tl.float32)
    full_end = length // TILE_N * TILE_N
    for first in range(0, length, TILE_N):
        # [TILE_N]; keys beyond the prompt's end are its last one, so that no load of rows needs a mask
        o_key = start + tl.minimum(first + tl.arange(0, TILE_N), length - 1)
        # [TILE_N, TILE_D]
        o_kv = o_key.to(tl.int64)[:, None] * stride_qkv + o_column[None, :]
        b_key = load_rows(p_qkv + WIDTH + o_kv, m_dim, HEAD_DIM < TILE_D)
        # [TILE_M, TILE_N]
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
        if first >= full_end:
            m_key = first + tl.arange(0, TILE_N) < length
            b_score = tl.where(m_key[None, :], b_score, float("-inf"))

        # Online softmax, in powers of two
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1) * score_scale)
        b_weight = tl.exp2(b_score * score_scale - b_new_max[:, None])
        b_decay = tl.exp2(b_max - b_new_max)
        b_max = b_new_max
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
        # [TILE_N, TILE_D]
        b_value = load_rows(p_qkv + 2 * WIDTH + o_kv, m_dim, HEAD_DIM < TILE_D)
        b_output = tl.dot(b_weight.to(b_query.dtype), b_value, b_output * b_decay[:, None], input_precision="ieee")
    # [TILE_M, TILE_D]
    o_out = o_token[:, None] * stride_output + o_column[None, :]
    tl.store(p_output + o_out, (b_output / b_sum[:, None]).to(p_output.dtype.element_ty), mask=m_query)


def prompt_attention(qkv: Tensor, starts: Tensor, num_heads: int) -> Tensor:
    """Attention in which each token sees all tokens of its prompt; scores are divided by the root of the head's size.

    FlashAttention-2 (arXiv:2307.08691) over prompts side by side, without padding. A prompt's bits do not depend on
    the other prompts.

    Args:
        qkv: [num_tokens, 3 * num_heads * head_dim], queries, keys and values side by side, the prompts one after
            another, last dimension contiguous.
        starts: int32 [num_prompts + 1], contiguous: where each prompt begins in `qkv`, and at last where the last one
            ends. No prompt is empty.
        num_heads: heads of at most 256 dimensions.

    Returns:
        [num_tokens, num_heads * head_dim], contiguous, of the dtype of `qkv`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device. What `starts` holds is not checked:
            that would wait for the GPU.
    """
    head_dim = _check(qkv, starts, num_heads)
    num_tokens, num_prompts, width = len(qkv), len(starts) - 1, num_heads * head_dim
    output = torch.empty((num_tokens, width), dtype=qkv.dtype, device=qkv.device)
    if output.numel() == 0 or num_prompts == 0:
        return output
    exact = qkv.dtype == torch.float32
    tile_m, tile_d = _QUERIES_EXACT if exact else _QUERIES, tile_dims(head_dim)
    tile_n = min(_MOST_KEYS, tile_keys(head_dim, qkv.dtype))
    # Of 3 stages, up to 3 tiles of keys and of values are kept beside the queries.
    taken = (tile_m + 3 * 2 * tile_n) * tile_d * qkv.dtype.itemsize
    fits = taken + 4096 <= device_limits(qkv.device).shared_memory
    score_scale, _ = score_parameters(head_dim**-0.5, None)
    _prompt_attention_kernel[(num_heads, num_tokens // tile_m + num_prompts)](
        output,
        qkv,
        starts,
        num_prompts,
        score_scale,
        output.stride(0),
        qkv.stride(0),
        WIDTH=width,
        HEAD_DIM=head_dim,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_D=tile_d,
        num_warps=8 if exact or head_dim > 128 else 4,
        num_stages=3 if fits else 2,
    )
    return output


def prompt_attention_reference(qkv: Tensor, starts: Tensor, num_heads: int) -> Tensor:
    """`prompt_attention` prompt by prompt in plain torch, in float32 throughout."""
    head_dim = _check(qkv, starts, num_heads)
    output = torch.empty((len(qkv), num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    for start, end in pairwise(starts.tolist()):
        query, key, value = qkv[start:end].float().view(end - start, 3, num_heads, head_dim).permute(1, 2, 0, 3)
        weight = (query @ key.mT * head_dim**-0.5).softmax(-1)
        output[start:end] = (weight @ value).transpose(0, 1).flatten(1).to(qkv.dtype)
    return output


def unsupported_prompt_heads(head_dim: int) -> str | None:
    """Why `prompt_attention` cannot attend with heads of so many dimensions; None: it can."""
    return wider_heads(head_dim, MAX_PROMPT_HEAD_DIM)


def _check(qkv: Tensor, starts: Tensor, num_heads: int) -> int:
    """The arguments; returns the dimensions of a head."""
    check_rows(qkv, "qkv")
    require(num_heads >= 1 and qkv.shape[1] % (3 * num_heads) == 0, "num_heads", f"divide {qkv.shape[1]} / 3")
    head_dim = qkv.shape[1] // (3 * num_heads)
    require(1 <= head_dim <= MAX_PROMPT_HEAD_DIM, "qkv", f"have at most {MAX_PROMPT_HEAD_DIM} dimensions a head")
    require(starts.ndim == 1 and len(starts) >= 1, "starts", "be [num_prompts + 1]")
    check_vector(starts, "starts", len(starts), torch.int32, qkv.device)
    return head_dim
