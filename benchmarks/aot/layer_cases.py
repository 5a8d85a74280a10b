"""Calls of the kernels between a layer's products, beside attention over a cache: norms, activations, embeddings; and
of those of encoders.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.aot.case import BF16, DTYPE_NAMES, FP16, FP32, NUM_TOKENS, Case, empty
from quire_kernels.activation import Activation, activation_product, gated_activation, plain_activation
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.layer_vectors import layer_vectors
from quire_kernels.post_norm import post_norm
from quire_kernels.prompt_attention import prompt_attention
from quire_kernels.row_norm import RowNorm, add_row_norm, row_norm


def _norm(width: int, *, is_centered: bool = False) -> RowNorm:
    return RowNorm(empty(width), 1e-5, empty(width) if is_centered else None, is_centered)


def layer_cases() -> Iterator[Case]:
    """Those of decoders."""
    for width in (576, 2048, 3584, 4096, 8192):
        yield Case(
            f"add and RMS norm: {width}",
            partial(add_row_norm, empty(64, width, dtype=FP32), empty(64, width), _norm(width), BF16),
        )
    yield Case(
        "add and layer norm: 2560",
        lambda: add_row_norm(empty(64, 2560, dtype=FP32), empty(64, 2560), _norm(2560, is_centered=True), BF16),
    )
    yield Case(
        "norm, add and RMS norm: 3584",
        lambda: add_row_norm(empty(64, 3584, dtype=FP32), empty(64, 3584), _norm(3584), BF16, update_norm=_norm(3584)),
    )
    yield Case(
        "norm and add: 4096",
        lambda: add_row_norm(empty(64, 4096, dtype=FP32), empty(64, 4096), None, BF16, update_norm=_norm(4096)),
    )
    yield Case(
        "norm, add, scale and RMS norm: 2560",
        lambda: add_row_norm(
            empty(64, 2560, dtype=FP32), empty(64, 2560), _norm(2560), BF16, update_norm=_norm(2560), sum_scale=0.5
        ),
    )
    yield Case("RMS norm of joint heads: 2048", lambda: row_norm(empty(64, 2048), _norm(2048), BF16))
    for activation in Activation:
        yield Case(
            f"gated {activation.value}: 14336",
            partial(gated_activation, empty(64, 2 * 14336), activation),
        )
        if activation is not Activation.SWIGLU_OAI:
            yield Case(f"{activation.value}: 10240", partial(plain_activation, empty(64, 10240), activation))
    ids, sampled = empty(NUM_TOKENS, dtype=torch.int64), empty(256, dtype=torch.int64)
    yield Case("embedding: 4096", lambda: embed_tokens(ids, sampled, empty(128256, 4096)))
    yield Case(
        "vectors of layers: 42 of 256",
        lambda: layer_vectors(
            ids,
            sampled,
            empty(262144, 42 * 256),
            empty(NUM_TOKENS, 42 * 256),
            _norm(256),
            embedding_scale=16.0,
            scale=0.5**0.5,
        ),
    )
    yield Case(
        "gelu_tanh times vectors of a layer: 256",
        lambda: activation_product(empty(64, 256), empty(64, 42, 256)[:, 1], Activation.GELU_TANH),
    )
    yield Case(
        "embedding with positions: 768",
        lambda: embed_tokens(ids, sampled, empty(50257, 768), positions=ids, position_embedding=empty(1024, 768)),
    )


def _prompts(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """The attention of an encoder."""
    qkv = empty(512, 3 * num_heads * head_dim, dtype=dtype)
    prompt_attention(qkv, empty(9, dtype=torch.int32), num_heads)


def encoder_cases() -> Iterator[Case]:
    """Attention and norms of encoders."""
    for model, num_heads, head_dim, dtype in (
        ("MiniLM L6", 12, 32, BF16),
        ("BGE M3", 16, 64, BF16),
        ("BGE M3", 16, 64, FP16),
        ("MiniLM L6", 12, 32, FP32),
        ("BGE M3", 16, 64, FP32),
        ("heads of 128", 8, 128, BF16),
        ("heads of 256", 4, 256, BF16),
        ("heads of 256", 4, 256, FP32),
    ):
        yield Case(
            f"prompts: {model}, {DTYPE_NAMES[dtype]}",
            partial(_prompts, num_heads, head_dim, dtype),
            dtype,
        )
    for width in (384, 1024):
        norm = _norm(width, is_centered=True)
        yield Case(
            f"layer norm of sums: {width}, bf16",
            partial(post_norm, empty(NUM_TOKENS, width, dtype=FP32), empty(NUM_TOKENS, width), norm, BF16),
        )
    yield Case(
        "layer norm of sums: 384, fp32",
        lambda: post_norm(
            empty(NUM_TOKENS, 384, dtype=FP32), empty(NUM_TOKENS, 384, dtype=FP32), _norm(384, is_centered=True), FP32
        ),
    )
