"""The calls of wrappers whose kernels are compiled: on meta tensors, in the shapes, dtypes and cache formats of served
models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.aot.case import (
    BF16,
    CONTEXT_LENGTH,
    DTYPE_NAMES,
    FP8,
    FP16,
    FP32,
    INT8,
    META,
    NUM_ROWS,
    NUM_TOKENS,
    Case,
    empty,
)
from benchmarks.aot.latent_cases import latent_cases
from benchmarks.aot.quantized_cases import quantized_cases
from quire_kernels.activation import Activation, gated_activation, plain_activation
from quire_kernels.adjust_logits import LogitEntries, Penalties, adjust_logits
from quire_kernels.block_copy import block_copy
from quire_kernels.choose_experts import choose_experts
from quire_kernels.combine_experts import combine_experts
from quire_kernels.decode_plan import DecodePlan, decode_splits
from quire_kernels.embed_tokens import embed_tokens
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.grouped_linear import choose_tile_rows, grouped_linear
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.log_norms import log_norms
from quire_kernels.logits_epilogue import logits_epilogue
from quire_kernels.mask_logits import mask_logits
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_decode import paged_decode
from quire_kernels.post_norm import post_norm
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles, queries_per_tile
from quire_kernels.prompt_attention import prompt_attention
from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.row_norm import RowNorm, add_row_norm, row_norm
from quire_kernels.sample import SamplingTensors, sample
from quire_kernels.sample_greedy import sample_greedy
from quire_kernels.store_kv import store_kv
from worker_svc.cache import CacheShape, LayerCache


@dataclass(frozen=True)
class Heads:
    """The heads of a served model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_norms: bool = False
    window: int | None = None
    soft_cap: float | None = None
    rotary_dim: int | None = None
    """How many dimensions of a head are rotated; None: all."""


MODELS = {
    "SmolLM2 135M": Heads(9, 3, 64),
    "Llama 3 8B": Heads(32, 8, 128),
    "Qwen2.5 7B": Heads(28, 4, 128),
    "Qwen3 8B": Heads(32, 8, 128, has_norms=True),
    "Gemma 2 9B": Heads(16, 8, 256, window=4096, soft_cap=50.0),
    "Gemma 2 27B": Heads(32, 16, 128, window=4096, soft_cap=50.0),
    "Gemma 3 1B": Heads(4, 1, 256, has_norms=True, window=512),
    "Phi 3 mini": Heads(32, 32, 96),
    "Pythia 2.8B": Heads(32, 32, 80, rotary_dim=20),
    "GPT-2": Heads(12, 12, 64, rotary_dim=0),
}
OTHER_HEADS = {"heads of 192": Heads(16, 8, 192), "64 heads for a KV head": Heads(64, 1, 128)}
"""Shapes that tiles are not made for: fewer dimensions than a power of two, and many heads in a group."""


def _cache(heads: Heads, block_size: int, dtype: torch.dtype) -> LayerCache:
    """The views of the second of two layers, as a worker lays its cache out."""
    shape = CacheShape(2, heads.num_kv_heads, block_size, heads.head_dim, dtype)
    return shape.allocate(4096, META).layer(1)


def _prefill(heads: Heads, dtype: torch.dtype, cache: LayerCache, num_seqs: int = 4, max_query_len: int = 512) -> None:
    tiles = None
    if max_query_len > 1:
        how = heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, cache.keys.dtype, META
        queries = queries_per_tile(*how)
        num_tiles = most_tiles(num_seqs * max_query_len, num_seqs, queries)
        tiles = PrefillTiles(queries, empty(num_tiles, 2, dtype=torch.int32))
    paged_attention(
        empty(num_seqs * max_query_len, heads.num_heads, heads.head_dim, dtype=dtype),
        cache.keys,
        cache.values,
        empty(num_seqs, CONTEXT_LENGTH // cache.keys.shape[2], dtype=torch.int32),
        empty(num_seqs + 1, dtype=torch.int32),
        empty(num_seqs, dtype=torch.int32),
        max_query_len,
        heads.head_dim**-0.5,
        window=heads.window,
        soft_cap=heads.soft_cap,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        tiles=tiles,
    )


def _decode(heads: Heads, dtype: torch.dtype, cache: LayerCache) -> None:
    num_seqs, kv = NUM_ROWS, cache.keys.dtype
    splits = decode_splits(heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, kv, META, heads.window)
    paged_decode(
        empty(num_seqs, heads.num_heads, heads.head_dim, dtype=dtype),
        cache.keys,
        cache.values,
        empty(num_seqs, CONTEXT_LENGTH // cache.keys.shape[2], dtype=torch.int32),
        empty(num_seqs, dtype=torch.int32),
        DecodePlan.make(splits, np.full(num_seqs, CONTEXT_LENGTH, np.int32), META),
        heads.head_dim**-0.5,
        window=heads.window,
        soft_cap=heads.soft_cap,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )


def _attention(
    model: str,
    dtype: torch.dtype = BF16,
    kv: torch.dtype | None = None,
    block_size: int = 16,
) -> Iterator[Case]:
    """Prefill and decode of a model."""
    heads, kv = (MODELS | OTHER_HEADS)[model], kv or dtype
    how = f"{model}, {DTYPE_NAMES[dtype]}" + (f", KV {DTYPE_NAMES[kv]}" if kv != dtype else "")
    how += f", blocks of {block_size}" if block_size != 16 else ""
    needs_fp8 = kv == FP8

    def case(kind: str, call: Callable[[LayerCache], None]) -> Case:
        return Case(f"{kind}: {how}", lambda: call(_cache(heads, block_size, kv)), dtype, needs_fp8)

    yield case("prefill", lambda cache: _prefill(heads, dtype, cache))
    yield case("decode", lambda cache: _decode(heads, dtype, cache))


def _attention_cases() -> Iterator[Case]:
    for model in ("SmolLM2 135M", "Llama 3 8B", "Qwen2.5 7B", "Gemma 2 9B", "Gemma 2 27B", "Phi 3 mini", "Pythia 2.8B"):
        yield from _attention(model)
    for model in ("Llama 3 8B", "SmolLM2 135M"):
        yield from _attention(model, FP16)
        yield from _attention(model, FP32)
    yield from _attention("Gemma 2 9B", FP32)
    for model in OTHER_HEADS:
        yield from _attention(model)
    yield from _attention("heads of 192", kv=INT8)
    for kv in (FP8, INT8):
        yield from _attention("Llama 3 8B", kv=kv)
        for model in ("SmolLM2 135M", "Pythia 2.8B", "Phi 3 mini", "Gemma 2 9B"):
            yield from _attention(model, kv=kv)
    yield from _attention("Llama 3 8B", FP32, kv=INT8)
    for block_size in (32, 64, 128):
        yield from _attention("Llama 3 8B", block_size=block_size)
    llama = MODELS["Llama 3 8B"]
    yield Case(
        "rows of one token in tiles: Llama 3 8B, bf16", lambda: _prefill(llama, BF16, _cache(llama, 16, BF16), 8, 1)
    )


def _rotate_and_store(heads: Heads, dtype: torch.dtype, kv: torch.dtype, *, norms_after_rotation: bool = False) -> None:
    cache = _cache(heads, 16, kv)
    weight = empty(heads.head_dim, dtype=dtype)
    rotary_dim = heads.head_dim if heads.rotary_dim is None else heads.rotary_dim
    rotary_store(
        empty(NUM_TOKENS, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype),
        empty(NUM_TOKENS, dtype=torch.int64),
        empty(rotary_dim // 2, dtype=FP32) if rotary_dim else None,
        cache.keys,
        cache.values,
        empty(NUM_TOKENS, dtype=torch.int64),
        norm=HeadNorm(weight, weight, 1e-6, 1e-6, norms_after_rotation) if heads.has_norms else None,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )


def _store(heads: Heads, kv: torch.dtype) -> None:
    cache = _cache(heads, 16, kv)
    rows = empty(NUM_TOKENS, heads.num_kv_heads, heads.head_dim)
    slots = empty(NUM_TOKENS, dtype=torch.int64)
    store_kv(rows, rows, cache.keys, cache.values, slots, key_scales=cache.key_scales, value_scales=cache.value_scales)


def _cache_cases() -> Iterator[Case]:
    for model, heads in MODELS.items():
        yield Case(f"rotary: {model}, bf16", partial(_rotate_and_store, heads, BF16, BF16))
    llama = MODELS["Llama 3 8B"]
    yield Case("rotary: Llama 3 8B, fp32", lambda: _rotate_and_store(llama, FP32, FP32), FP32)
    for kv in (FP8, INT8):
        name, is_fp8 = DTYPE_NAMES[kv], kv == FP8
        for model in ("Llama 3 8B", "Qwen3 8B", "Pythia 2.8B", "SmolLM2 135M", "Phi 3 mini", "Gemma 2 9B"):
            yield Case(
                f"rotary: {model}, bf16, KV {name}",
                partial(_rotate_and_store, MODELS[model], BF16, kv),
                needs_fp8=is_fp8,
            )
        yield Case(f"store: Llama 3 8B, bf16, KV {name}", partial(_store, llama, kv), needs_fp8=is_fp8)
    qwen = MODELS["Qwen3 8B"]
    yield Case("rotary, then norms: bf16", lambda: _rotate_and_store(qwen, BF16, BF16, norms_after_rotation=True))
    yield Case("store: Llama 3 8B, bf16", lambda: _store(llama, BF16))
    yield Case(
        "copies of blocks of 2 MiB",
        lambda: block_copy(
            empty(64, 2 << 20, dtype=torch.uint8),
            empty(64, 2 << 20, dtype=torch.uint8),
            empty(16, 2, dtype=torch.int64),
        ),
    )


def _norm(width: int, *, is_centered: bool = False) -> RowNorm:
    return RowNorm(empty(width), 1e-5, empty(width) if is_centered else None, is_centered)


def _layer_cases() -> Iterator[Case]:
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
    yield Case("RMS norm of joint heads: 2048", lambda: row_norm(empty(64, 2048), _norm(2048), BF16))
    for activation in Activation:
        yield Case(
            f"gated {activation.value}: 14336",
            partial(gated_activation, empty(64, 2 * 14336), activation),
        )
        yield Case(f"{activation.value}: 10240", partial(plain_activation, empty(64, 10240), activation))
    ids, sampled = empty(NUM_TOKENS, dtype=torch.int64), empty(256, dtype=torch.int64)
    yield Case("embedding: 4096", lambda: embed_tokens(ids, sampled, empty(128256, 4096)))
    yield Case(
        "embedding with positions: 768",
        lambda: embed_tokens(ids, sampled, empty(50257, 768), positions=ids, position_embedding=empty(1024, 768)),
    )


def _prompts(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """The attention of an encoder."""
    qkv = empty(512, 3 * num_heads * head_dim, dtype=dtype)
    prompt_attention(qkv, empty(9, dtype=torch.int32), num_heads)


def _encoder_cases() -> Iterator[Case]:
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


def _product(inputs: int, outputs: int, dtype: torch.dtype, out: torch.dtype | None = None) -> Case:
    def call() -> Tensor:
        into = None if out is None else empty(NUM_ROWS, outputs, dtype=out)
        return invariant_linear(empty(NUM_ROWS, inputs, dtype=dtype), empty(outputs, inputs, dtype=dtype), out=into)

    into = "" if out is None else f" in {DTYPE_NAMES[out]}"
    return Case(f"invariant product: {inputs} to {outputs}{into}, {DTYPE_NAMES[dtype]}", call, dtype)


def _experts(num_tokens: int, dtype: torch.dtype, num_experts: int, num_chosen: int, width: int) -> None:
    """All kernels of a layer of experts for a hidden size of 2,048."""
    hidden = 2048
    choices = choose_experts(
        empty(num_tokens, num_experts, dtype=FP32), num_experts, num_chosen, normalized=True, scale=1.0
    )
    num_rows = choices.experts.numel()
    tile_rows = choose_tile_rows(num_rows, num_experts, dtype, deterministic=False)
    groups = group_by_expert(choices.experts, num_experts, tile_rows)
    gate_up = empty(num_experts, 2 * width, hidden, dtype=dtype)
    active = grouped_linear(empty(num_tokens, hidden, dtype=dtype), gate_up, groups, num_rows, Activation.SILU)
    rows = grouped_linear(active, empty(num_experts, hidden, width, dtype=dtype), groups, num_rows)
    combine_experts(rows, choices.weights)


def _product_cases() -> Iterator[Case]:
    yield _product(4096, 6144, BF16)
    yield _product(4096, 28672, BF16)
    yield _product(14336, 4096, BF16)
    yield _product(576, 960, BF16)
    yield _product(4096, 6144, FP16)
    yield _product(4096, 6144, FP32)
    yield _product(4096, 128256, BF16, FP32)
    for num_tokens in (8, 512):
        yield Case(
            f"128 experts, 8 chosen: {num_tokens} tokens, bf16",
            partial(_experts, num_tokens, BF16, 128, 8, 768),
        )
    yield Case("8 experts, 2 chosen: 512 tokens, bf16", lambda: _experts(512, BF16, 8, 2, 14336))
    yield Case("128 experts, 8 chosen: 64 tokens, fp32", lambda: _experts(64, FP32, 128, 8, 768), FP32)


def _penalties(rows: int, vocab: int) -> Penalties:
    factors = empty(rows, dtype=FP32)
    return Penalties(empty(rows, dtype=torch.int64), factors, factors, factors, empty(256, vocab, dtype=torch.int32))


def _sample(rows: int, vocab: int) -> None:
    numbers, words = empty(rows, dtype=FP32), empty(rows, dtype=torch.int32)
    seeds, top_p = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.float64)
    sampling = SamplingTensors(numbers, words, top_p, numbers, seeds, words, words)
    sample(empty(rows, vocab, dtype=FP32), sampling, _penalties(rows, vocab))


def _sampling_cases() -> Iterator[Case]:
    for rows, vocab in ((1, 128256), (64, 128256), (64, 49152), (64, 151936), (64, 256000)):
        yield Case(
            f"sampling: {rows} rows of {vocab}",
            partial(_sample, rows, vocab),
        )
    vocab = 128256
    logits = empty(NUM_ROWS, vocab, dtype=FP32)
    tokens = empty(NUM_ROWS, dtype=torch.int64)
    yield Case("greedy sampling", lambda: sample_greedy(logits, tokens))
    words = empty(1024, dtype=torch.int32)
    entries = LogitEntries(words, words, empty(1024, dtype=FP32))
    yield Case("changes of logits", lambda: adjust_logits(logits, entries, _penalties(NUM_ROWS, vocab)))
    masks = empty(NUM_ROWS, -(-vocab // 32), dtype=torch.int32)
    rows_of_masks = empty(NUM_ROWS, dtype=torch.int64)
    yield Case("masks of logits", lambda: mask_logits(logits, rows_of_masks, masks))
    yield Case("log norms", lambda: log_norms(logits))
    yield Case("soft cap of logits", lambda: logits_epilogue(logits, None, 30.0))
    yield Case("factor of logits", lambda: logits_epilogue(logits, None, None, scale=0.125))
    yield Case("bias of logits", lambda: logits_epilogue(logits, empty(vocab), None))


def all_cases() -> list[Case]:
    """All cases, each with a name of its own."""
    return [
        *_attention_cases(),
        *latent_cases(),
        *_cache_cases(),
        *_layer_cases(),
        *_encoder_cases(),
        *_product_cases(),
        *quantized_cases(),
        *_sampling_cases(),
    ]
