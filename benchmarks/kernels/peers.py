"""Attention of other libraries: torch's SDPA and FlexAttention, and FlashInfer and flash-attn where installed."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.case import Run
from benchmarks.kernels.pages import BLOCK_SIZE, PagedBatch

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def attention_peers(batch: PagedBatch, device: torch.device) -> dict[str, Run]:
    """Peers of attention over these pages. All but those "with gather" and FlashInfer read keys in one piece."""
    key, value = batch.gather()
    query = batch.plain_query()
    # A chunk's queries see all tokens before them.
    is_whole = batch.num_queries == batch.context_len
    mask: Any = None
    if batch.num_queries > 1 and not is_whole:
        # Not a tensor of booleans, which no fast backend takes
        mask = causal_lower_right(batch.num_queries, batch.context_len)

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        output = scaled_dot_product_attention(query, keys, values, mask, is_causal=is_whole, enable_gqa=True)
        return batch.flat(output)

    peers: dict[str, Run] = {"SDPA": partial(sdpa, key, value), "SDPA with gather": lambda: sdpa(*batch.gather())}
    if device.type != "cuda":
        return peers
    for name, backend in _BACKENDS.items():
        peers[f"SDPA, {name}"] = partial(_with_backend, backend, partial(sdpa, key, value))
    peers["FlexAttention"] = _flex(batch, query, key, value)
    if importlib.util.find_spec("flashinfer"):
        peers["FlashInfer"] = _flashinfer(batch)
    if importlib.util.find_spec("flash_attn"):
        peers["flash-attn"] = _flash_attn(batch, key, value)
    return peers


def _with_backend(backend: SDPBackend, run: Callable[[], Tensor]) -> Tensor:
    with sdpa_kernel(backend):
        return run()


def _once(make: Callable[[], Run]) -> Run:
    """A run that is made at its first call, so that its errors are those of a run."""
    made: list[Run] = []

    def run() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return run


def _flex(batch: PagedBatch, query: Tensor, key: Tensor, value: Tensor) -> Run:
    def make() -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        before = batch.context_len - batch.num_queries

        def causal(_b: Tensor, _h: Tensor, place: Tensor, key_place: Tensor) -> Tensor:
            return place + before >= key_place

        mask: Any = None
        if batch.num_queries > 1:
            mask = create_block_mask(causal, None, None, batch.num_queries, batch.context_len, query.device)
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        return lambda: batch.flat(compiled(query, key, value, block_mask=mask, enable_gqa=True))

    return _once(make)


def _flashinfer(batch: PagedBatch) -> Run:
    """Over the same pages. Planning is not measured: it is done once for all layers."""

    def make() -> Run:
        flashinfer = importlib.import_module("flashinfer")

        heads, pages = batch.heads, batch.block_tables.shape[1]
        counts = torch.arange(0, batch.num_seqs * pages + 1, pages, dtype=torch.int32, device=batch.query.device)
        last = torch.full_like(batch.context_lens, batch.context_len - (pages - 1) * BLOCK_SIZE)
        cache = (batch.key_cache.contiguous(), batch.value_cache.contiguous())
        workspace = torch.empty(2**28, dtype=torch.uint8, device=batch.query.device)
        table = batch.block_tables.flatten()
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)
        if batch.num_queries == 1:
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            decode.plan(counts, table, last, *shape, q_data_type=batch.query.dtype)
            return lambda: decode.run(batch.query, cache)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        prefill.plan(batch.query_starts, counts, table, last, *shape, causal=True, q_data_type=batch.query.dtype)
        return lambda: prefill.run(batch.query, cache)

    return _once(make)


def _flash_attn(batch: PagedBatch, key: Tensor, value: Tensor) -> Run:
    """Over keys in one piece: its own pages hold at least 256 tokens."""

    def make() -> Run:
        flash_attn_with_kvcache = importlib.import_module("flash_attn").flash_attn_with_kvcache

        shape = (batch.num_seqs, batch.num_queries, batch.heads.num_heads, batch.heads.head_dim)
        query = batch.query.view(shape)
        keys, values = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        lengths = batch.context_lens
        return lambda: flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, causal=True).flatten(0, 1)

    return _once(make)
