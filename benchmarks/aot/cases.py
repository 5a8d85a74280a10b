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
from benchmarks.aot.layer_cases import encoder_cases, layer_cases
from benchmarks.aot.quantized_cases import quantized_cases
from quire_kernels.activation import Activation
from quire_kernels.adjust_logits import LogitEntries, Penalties, adjust_logits
from quire_kernels.block_copy import block_copy
from quire_kernels.choose_experts import choose_experts
from quire_kernels.combine_experts import combine_experts
from quire_kernels.decode_plan import DecodePlan, decode_splits
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.grouped_linear import choose_tile_rows, grouped_linear
from quire_kernels.invariant_linear import invariant_linear
from quire_kernels.log_norms import log_norms
from quire_kernels.logits_epilogue import logits_epilogue
from quire_kernels.mask_logits import mask_logits
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_decode import paged_decode
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles, queries_per_tile
from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.rotate_queries import rotate_queries
from quire_kernels.row_norm import RowNorm
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
    has_sinks: bool = False
    has_value_norm: bool = False
    values_are_keys: bool = False


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
    "gpt-oss 20B": Heads(64, 8, 64, window=128, has_sinks=True),
    "Gemma 4, window": Heads(16, 8, 256, has_norms=True, window=1024, has_value_norm=True),
    "Gemma 4, no window": Heads(16, 2, 512, has_norms=True, has_value_norm=True, values_are_keys=True),
}
OTHER_HEADS = {
    "heads of 192": Heads(16, 8, 192),
    "heads of 384": Heads(16, 8, 384),
    "64 heads for a KV head": Heads(64, 1, 128),
}
"""Shapes that tiles are not made for: fewer dimensions than a power of two, and many heads in a group."""


def _cache(heads: Heads, block_size: int, dtype: torch.dtype) -> LayerCache:
    """The views of the second of two layers, as a worker lays its cache out."""
    shape = CacheShape.of_equal_layers(2, heads.num_kv_heads, block_size, heads.head_dim, dtype)
    return shape.allocate(4096, META).layers[1]


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
        sinks=empty(heads.num_heads, dtype=FP32) if heads.has_sinks else None,
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
        sinks=empty(heads.num_heads, dtype=FP32) if heads.has_sinks else None,
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
    yield from _attention("gpt-oss 20B")
    yield from _attention("gpt-oss 20B", kv=FP8)
    for model in ("Llama 3 8B", "SmolLM2 135M"):
        yield from _attention(model, FP16)
        yield from _attention(model, FP32)
    yield from _attention("Gemma 2 9B", FP32)
    yield from _attention("Gemma 4, window")
    # Not in float32 over codes, which compiles too, but spills registers
    for dtype, kv in ((BF16, BF16), (BF16, FP8), (BF16, INT8), (FP32, FP32)):
        yield from _attention("Gemma 4, no window", dtype, kv)
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
    num_parts = 1 if heads.values_are_keys else 2
    rotary_store(
        empty(NUM_TOKENS, (heads.num_heads + num_parts * heads.num_kv_heads) * heads.head_dim, dtype=dtype),
        empty(NUM_TOKENS, dtype=torch.int64),
        empty(rotary_dim // 2, dtype=FP32) if rotary_dim else None,
        cache.keys,
        cache.values,
        empty(NUM_TOKENS, dtype=torch.int64),
        norm=HeadNorm(weight, weight, 1e-6, 1e-6, norms_after_rotation) if heads.has_norms else None,
        value_epsilon=1e-6 if heads.has_value_norm else None,
        values_are_keys=heads.values_are_keys,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )


def _rotate_queries(heads: Heads, dtype: torch.dtype) -> None:
    rotate_queries(
        empty(NUM_TOKENS, heads.num_heads * heads.head_dim, dtype=dtype),
        empty(NUM_TOKENS, dtype=torch.int64),
        empty(heads.head_dim // 2, dtype=FP32),
        heads.head_dim,
        norm=RowNorm(empty(heads.head_dim, dtype=dtype), 1e-6),
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
        for model in (
            "Llama 3 8B",
            "Qwen3 8B",
            "Pythia 2.8B",
            "SmolLM2 135M",
            "Phi 3 mini",
            "Gemma 2 9B",
            "Gemma 4, no window",
        ):
            yield Case(
                f"rotary: {model}, bf16, KV {name}",
                partial(_rotate_and_store, MODELS[model], BF16, kv),
                needs_fp8=is_fp8,
            )
        yield Case(f"store: Llama 3 8B, bf16, KV {name}", partial(_store, llama, kv), needs_fp8=is_fp8)
    qwen = MODELS["Qwen3 8B"]
    yield Case("rotary, then norms: bf16", lambda: _rotate_and_store(qwen, BF16, BF16, norms_after_rotation=True))
    for model in ("Gemma 4, window", "Gemma 4, no window"):
        yield Case(f"rotary of queries: {model}, bf16", partial(_rotate_queries, MODELS[model], BF16))
    yield Case("store: Llama 3 8B, bf16", lambda: _store(llama, BF16))
    yield Case(
        "copies of blocks of 2 MiB",
        lambda: block_copy(
            empty(64, 2 << 20, dtype=torch.uint8),
            empty(64, 2 << 20, dtype=torch.uint8),
            empty(16, 2, dtype=torch.int64),
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


def _biased_experts(num_tokens: int, dtype: torch.dtype) -> None:
    """Both products of a layer of gpt-oss 20B."""
    num_experts, num_chosen, hidden = 32, 4, 2880
    experts = empty(num_tokens, num_chosen, dtype=torch.int32)
    tile_rows = choose_tile_rows(experts.numel(), num_experts, dtype, deterministic=False)
    groups = group_by_expert(experts, num_experts, tile_rows)
    inputs, gate_up = empty(num_tokens, hidden, dtype=dtype), empty(num_experts, 2 * hidden, hidden, dtype=dtype)
    bias = empty(num_experts, 2 * hidden, dtype=dtype)
    active = grouped_linear(inputs, gate_up, groups, experts.numel(), Activation.SWIGLU_OAI, bias)
    down = empty(num_experts, hidden, hidden, dtype=dtype)
    grouped_linear(active, down, groups, experts.numel(), bias=empty(num_experts, hidden, dtype=dtype))


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
    for num_tokens in (8, 512):
        yield Case(f"32 experts with biases: {num_tokens} tokens, bf16", partial(_biased_experts, num_tokens, BF16))
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
        *layer_cases(),
        *encoder_cases(),
        *_product_cases(),
        *quantized_cases(),
        *_sampling_cases(),
    ]
