"""Cases of attention over pages, on a GPU and on a processor."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.kernels.case import KernelCase, SpeedTarget
from benchmarks.kernels.device import Bound
from benchmarks.kernels.pages import BLOCK_SIZE, Heads, PagedBatch
from benchmarks.kernels.peers import attention_peers


def decode(device: torch.device, heads: Heads, num_seqs: int, context_len: int) -> KernelCase:
    """One new token of each sequence, bound by reading keys and values."""
    from quire_kernels.paged_decode import paged_decode

    batch = PagedBatch.make(heads, num_seqs, 1, context_len, device)
    plan = batch.decode_plan()

    def ours() -> object:
        return paged_decode(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_tables,
            batch.context_lens,
            plan,
            batch.scale,
        )

    shape = _shape(heads, f"{num_seqs} × {context_len} tokens")
    asked = SpeedTarget.DECODE if num_seqs >= 32 and context_len >= 4096 else SpeedTarget.NOTHING
    return KernelCase("paged_decode", shape, Bound.MEMORY, batch.kv_bytes, ours, attention_peers(batch, device), asked)


def decode_ragged(device: torch.device, heads: Heads, contexts: Sequence[int], name: str) -> KernelCase:
    """The same for contexts of these lengths, which no peer takes without a plan of its own."""
    from quire_kernels.paged_decode import paged_decode

    longest = max(contexts)
    batch = PagedBatch.make(heads, len(contexts), 1, longest, device)
    batch = replace(batch, context_lens=torch.tensor(contexts, dtype=torch.int32, device=device))
    plan = batch.decode_plan()

    def ours() -> object:
        return paged_decode(
            batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.context_lens, plan, batch.scale
        )

    amount = batch.kv_bytes // (len(contexts) * longest) * sum(contexts)
    return KernelCase("paged_decode", _shape(heads, name), Bound.MEMORY, amount, ours, asked=SpeedTarget.RAGGED_DECODE)


def decode_8bit(device: torch.device, heads: Heads, num_seqs: int, context_len: int, dtype: torch.dtype) -> KernelCase:
    """Over keys and values in 8 bits with a scale for each vector. The peers read the same ones in 16 bits."""
    from quire_kernels.kv_quantization import quantize
    from quire_kernels.paged_decode import paged_decode

    batch = PagedBatch.make(heads, num_seqs, 1, context_len, device)
    keys, key_scales = quantize(batch.key_cache, dtype)
    values, value_scales = quantize(batch.value_cache, dtype)
    plan = batch.decode_plan(dtype)

    def ours() -> object:
        return paged_decode(
            batch.query,
            keys,
            values,
            batch.block_tables,
            batch.context_lens,
            plan,
            batch.scale,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    scale_bytes = 2 * num_seqs * context_len * heads.num_kv_heads * key_scales.element_size()
    amount = batch.kv_bytes // batch.key_cache.element_size() + scale_bytes
    shape = _shape(heads, f"{num_seqs} × {context_len} tokens, {str(dtype).removeprefix('torch.')}")
    return KernelCase("paged_decode", shape, Bound.MEMORY, amount, ours, attention_peers(batch, device))


def prefill(device: torch.device, heads: Heads, num_seqs: int, num_queries: int, context_len: int) -> KernelCase:
    """Prompts, or chunks behind computed tokens, bound by matrix products."""
    from quire_kernels.paged_attention import paged_attention

    batch = PagedBatch.make(heads, num_seqs, num_queries, context_len, device)
    tiles = batch.tiles()

    def ours() -> object:
        return paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            num_queries,
            batch.scale,
            tiles=tiles,
        )

    shape = _shape(heads, f"{num_seqs} × {num_queries} of {context_len} tokens")
    peers = attention_peers(batch, device)
    return KernelCase("paged_attention", shape, Bound.MATRIX, batch.operations, ours, peers, SpeedTarget.PREFILL)


def cpu_attention(device: torch.device, heads: Heads, num_seqs: int, num_queries: int, context_len: int) -> KernelCase:
    """The CPU path in torch, without its plan, which is made once for all layers."""
    from quire_kernels.cpu_attention import cpu_paged_attention, plan_cpu_attention

    batch = PagedBatch.make(heads, num_seqs, num_queries, context_len, device)
    tables, starts, lengths = (t.numpy() for t in (batch.block_tables, batch.query_starts, batch.context_lens))
    plan = plan_cpu_attention(tables, starts, lengths, BLOCK_SIZE)

    def ours() -> object:
        return cpu_paged_attention(batch.query, batch.key_cache, batch.value_cache, plan, batch.scale)

    shape = _shape(heads, f"{num_seqs} × {num_queries} of {context_len} tokens")
    if num_queries == 1:
        bound, amount = Bound.MEMORY, batch.kv_bytes
    else:
        bound, amount = Bound.MATRIX, batch.operations
    return KernelCase("cpu_paged_attention", shape, bound, amount, ours, attention_peers(batch, device))


def _shape(heads: Heads, text: str) -> str:
    return f"{heads.num_kv_heads} × {heads.group} heads of {heads.head_dim}, {text}"
