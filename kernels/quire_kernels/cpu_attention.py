"""Paged attention and KV store in plain torch, for workers without a GPU, in the layout of `plan_cpu_attention`."""

import math
import threading

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire_kernels._checks import PagedKV, check_cache, check_heads, check_index, check_store_kv, require
from quire_kernels._cpu_plan import Chunks, CpuAttentionPlan, GatheredPages, Tiles, plan_cpu_attention

__all__ = ["CpuAttentionPlan", "cpu_paged_attention", "cpu_store_kv", "plan_cpu_attention"]


def cpu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CpuAttentionPlan,
    scale: float,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` on a CPU: causal attention of each sequence's newest tokens over its pages.

    Scores and sums are float32 for any dtype. Beyond a context only the rest of its last page is read, and before its
    window the rest of the first page; neither influences the result.

    Args:
        query: [num_tokens, num_heads, head_dim], the sequences one after another, last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], one layer's views of the cache,
            contiguous within a block.
        plan: the step's; it holds the window.
        scale: the factor of scores before the softmax.
        soft_cap: c, where scores s become c * tanh(s / c) (arXiv:2408.00118, section 2); None: no cap.
        sinks: float32 [num_heads], one more score for each head, of a key without a value; None: none.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    check_cache(PagedKV(key_cache, value_cache))
    check_heads(query, key_cache, "query")
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    page = block_size * head_dim
    whole_pages = key_cache.stride(0) % page == 0 and key_cache.stride()[1:] == (page, head_dim, 1)
    require(whole_pages, "key_cache", "be contiguous within a block, at whole pages")
    require(query.shape[1] % num_kv_heads == 0, "query", "have a multiple of key_cache's num_kv_heads heads")
    require(soft_cap is None or soft_cap > 0, "soft_cap", "be positive")
    if sinks is not None:
        check_index(sinks, key_cache, (query.shape[1],), torch.float32, "sinks")
    require(plan.num_tokens == query.shape[0], "plan", "be of as many tokens as query")
    require(plan.block_size == block_size, "plan", "be of the block_size of key_cache")
    if len(plan.parts) == 1:
        return _attend(query, key_cache, value_cache, plan.parts[0], scale, soft_cap, sinks)
    output = query.new_empty(query.shape)
    for part in plan.parts:
        output.index_copy_(0, part.tokens, _attend(query, key_cache, value_cache, part, scale, soft_cap, sinks))
    return output


def cpu_store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`store_kv` on a CPU, with the same arguments and errors."""
    check_store_kv(key, value, PagedKV(key_cache, value_cache), slots)
    stored = slots >= 0
    if not stored.all():
        key, value, slots = key[stored], value[stored], slots[stored]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    part: Tiles | Chunks,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if isinstance(part, Tiles):
        return _attend_tiles(query, key_cache, value_cache, part, scale, soft_cap, sinks)
    return _attend_chunks(query, key_cache, value_cache, part, scale, soft_cap, sinks)


def _attend_tiles(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tiles: Tiles,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    _, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    queries = query if tiles.read is None else query.index_select(0, tiles.read)
    # [num_tiles, num_kv_heads, group, num_queries, head_dim]; the group becomes more queries, which share their keys
    queries = queries.view(-1, tiles.num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    operands = (
        queries.flatten(2, 3),
        _gather(key_cache, tiles.pages, _key_buffer)[:, :, : tiles.num_keys],
        _gather(value_cache, tiles.pages, _value_buffer)[:, :, : tiles.num_keys],
    )
    # [num_kv_heads, group * num_queries, 1]
    of_rows = None if sinks is None else sinks.repeat_interleave(tiles.num_queries).view(num_kv_heads, -1, 1)
    if soft_cap is not None:
        output = _capped_attention(*operands, _bias(tiles, group, torch.float32), scale, soft_cap, of_rows)
    elif of_rows is not None:
        output = _attention_with_sinks(*operands, _bias(tiles, group, query.dtype), scale, of_rows)
    else:
        bias = _bias(tiles, group, query.dtype)
        output = scaled_dot_product_attention(*operands, attn_mask=bias, scale=scale)
    output = output.view(queries.shape).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)
    return output.contiguous() if tiles.real is None else output.index_select(0, tiles.real)


def _attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Attention by the kernel behind `scaled_dot_product_attention`, which also returns the logarithm of each row's sum
    of exponentials: the keys' share of all weights is the sigmoid of its difference from the sink.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor
    output, logs = attend(query, key, value, attn_mask=bias, scale=scale)
    return (output * torch.sigmoid(logs[..., None] - sinks)).to(output.dtype)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores, which `scaled_dot_product_attention` does not compute."""
    scores = _dot(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(*query.shape[:3], -1)
    _cap(scores.mul_(scale), soft_cap)
    if bias is not None:
        scores.add_(bias)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = scores.sub_(highest).exp_()
        weights.div_(weights.sum(-1, keepdim=True).add_((sinks - highest).exp_()))
    return torch.matmul(weights.to(value.dtype), value)


def _cap(scores: Tensor, soft_cap: float) -> None:
    scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _bias(tiles: Tiles, group: int, dtype: torch.dtype) -> Tensor | None:
    if tiles.hidden is None:
        return None
    bias = tiles.pages.memo.get((group, dtype))
    if bias is None:
        bias = torch.zeros(tiles.hidden.shape, dtype=dtype).masked_fill_(tiles.hidden, -math.inf)
        bias = tiles.pages.memo[group, dtype] = bias.repeat(1, 1, group, 1)
    return bias


def _attend_chunks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunks: Chunks,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    _, num_heads, head_dim = query.shape
    group = num_heads // key_cache.shape[1]
    num_contexts, num_chunks = len(chunks.tokens), len(chunks.context)
    parts = torch.empty(num_chunks, num_heads, head_dim)
    sums = torch.empty(num_chunks, num_heads, 1)
    logs = torch.empty(num_chunks, num_heads, 1)
    for slab in chunks.slabs:
        # One product for each chunk and KV head, of the group's queries
        queries = query.index_select(0, slab.tokens).view(-1, group, head_dim)
        keys = _gather(key_cache, slab.pages, _key_buffer).flatten(0, 1)
        scores = _dot(queries, keys.transpose(1, 2)).view(len(slab.tokens), num_heads, -1)
        scores.mul_(scale)
        if soft_cap is not None:
            _cap(scores, soft_cap)
        scores.masked_fill_(slab.hidden, -math.inf)
        highest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        torch.sum(weights, -1, keepdim=True, out=sums[slab.chunks])
        torch.add(highest, sums[slab.chunks].log(), out=logs[slab.chunks])
        values = _gather(value_cache, slab.pages, _value_buffer).flatten(0, 1)
        weights = weights.to(values.dtype).view(len(values), group, -1)
        parts[slab.chunks] = torch.bmm(weights, values).view(-1, num_heads, head_dim)
    # Flash-decoding: a chunk's share of its context is the softmax of the logarithms of its sums of exponentials.
    place = (chunks.context, chunks.number)
    shares = torch.full((num_contexts, chunks.max_chunks + (sinks is not None), num_heads, 1), -math.inf)
    if sinks is not None:
        shares[:, -1, :, 0] = sinks
    shares = shares.index_put_(place, logs).softmax(1)[place]
    output = torch.zeros(num_contexts, num_heads, head_dim)
    return output.index_add_(0, chunks.context, parts.mul_(shares.div_(sums))).to(query.dtype)


def _dot(queries: Tensor, keys: Tensor) -> Tensor:
    """The batched product, in float32."""
    if queries.dtype != torch.bfloat16:
        return torch.bmm(queries.float(), keys.float())
    # Torch rounds a bfloat16 product to bfloat16, and so a score of 16 by up to 0.06. A second product, less the first
    # before it is rounded in turn, restores the difference, in less time than converting the keys takes.
    rounded = torch.bmm(queries, keys)
    return torch.baddbmm(rounded, queries, keys, beta=-1).float().add_(rounded)


class _Buffer(threading.local):
    """Memory for gathered pages, reused by all layers, one for each thread. New memory of that size would cause page
    faults each time, which took up to five times as long as all the rest."""

    memory = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        size = rows * columns * dtype.itemsize
        if self.memory.numel() < size:
            with torch.inference_mode(False):  # else it could not be written outside of inference mode
                self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory[:size].view(dtype).view(rows, columns)


_key_buffer = _Buffer()
_value_buffer = _Buffer()


def _gather(cache: Tensor, pages: GatheredPages, buffer: _Buffer) -> Tensor:
    """[num_contexts, num_kv_heads, keys of num_pages, head_dim], valid until the buffer is used again."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    page = block_size * head_dim
    # The view as rows of a head's page each, and the steps from block to block in such rows: whole rows copy fastest
    step = cache.stride(0) // page
    rows = cache.as_strided(((num_blocks - 1) * step + num_kv_heads, page), (page, 1))
    index = pages.memo.get((num_kv_heads, step))
    if index is None:
        index = (pages.blocks[:, None, :] * step + torch.arange(num_kv_heads)[:, None]).flatten()
        pages.memo[num_kv_heads, step] = index
    gathered = torch.index_select(rows, 0, index, out=buffer.take(len(index), page, cache.dtype))
    gathered = gathered.view(len(pages.blocks), num_kv_heads, -1, head_dim)
    if len(pages.unused[0]):
        # Zero times NaN is NaN
        gathered.transpose(1, 2).index_put_(pages.unused, gathered.new_zeros(()))
    return gathered
