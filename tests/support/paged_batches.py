"""Batches over a paged cache. Slots that no query may read are filled with invalid values."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire_kernels.kv_quantization import quantize, scale_shape

if TYPE_CHECKING:
    from quire_kernels.decode_plan import DecodePlan

# As bytes these are NaN of float8_e4m3fn, and 127 and -1 of int8. Scales made of them are NaN.
POISON_BYTES = (0x7F, 0xFF)
INVALID_BLOCKS = (2**31 - 1, -7)


@dataclass(frozen=True)
class Batch:
    """Arguments of `paged_attention`. Everything that no query may read is NaN, infinite, or an invalid block."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    max_query_len: int
    scale: float
    window: int | None
    soft_cap: float | None
    key_scales: Tensor | None
    value_scales: Tensor | None
    sinks: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `paged_attention`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def tiled_arguments(self) -> dict[str, Any]:
        """Arguments of `paged_attention`, with tiles as a worker plans them."""
        from quire_kernels.prefill_tiles import PrefillTiles, queries_per_tile

        num_tokens, num_heads, head_dim = self.query.shape
        device = self.query.device
        heads = num_heads, self.key_cache.shape[1], head_dim
        queries = queries_per_tile(*heads, self.query.dtype, self.key_cache.dtype, device)
        sequences = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        return self.arguments() | {"tiles": PrefillTiles.make(*sequences, num_tokens, queries, device)}

    def decode_arguments(self, **changes: Any) -> dict[str, Any]:
        """Arguments of `paged_decode`: each sequence has one query. `changes` are fields of the plan's splits."""
        arguments = self.arguments() | {"plan": self.decode_plan(self.context_lens, **changes)}
        del arguments["query_starts"], arguments["max_query_len"]
        return arguments

    def decode_plan(self, context_lens: Tensor, **changes: Any) -> "DecodePlan":
        """A plan for other contexts of such sequences."""
        # Here, so that a process that only lists cases does not choose how kernels run
        from quire_kernels.decode_plan import DecodePlan, decode_splits

        num_heads, head_dim = self.query.shape[1:]
        num_kv_heads, device = self.key_cache.shape[1], self.query.device
        dtypes = self.query.dtype, self.key_cache.dtype
        splits = replace(decode_splits(num_heads, num_kv_heads, head_dim, *dtypes, device, self.window), **changes)
        return DecodePlan.make(splits, context_lens.cpu().numpy(), device)


def make_batch(
    sequences: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    *,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    device: str = "cpu",
) -> Batch:
    """Sequences are (queries, context), heads are (KV heads, group). A cache_dtype makes it a quantized cache."""
    torch.manual_seed(0)
    num_kv_heads, group = heads
    queries = torch.tensor([queries for queries, _ in sequences])
    contexts = torch.tensor([context for _, context in sequences])
    num_pages = -(-contexts // block_size)
    num_blocks = int(num_pages.sum()) * 5 // 4 + 3
    block_tables = torch.empty(len(sequences), int(num_pages.max()) + 2, dtype=torch.int32)
    block_tables[:, 0::2], block_tables[:, 1::2] = INVALID_BLOCKS
    # Of the keys that the first query sees, or any later one
    first_seen = torch.zeros_like(contexts) if window is None else (contexts - queries + 1 - window).clamp(min=0)
    blocks = torch.randperm(num_blocks, dtype=torch.int32)
    for row, (pages, first) in enumerate(zip(num_pages.tolist(), (first_seen // block_size).tolist(), strict=True)):
        block_tables[row, first:pages] = blocks[first:pages]
        blocks = blocks[pages:]

    # As in a worker: the keys and values of a layer are views of a cache of two
    shape = (num_blocks, 2, 2, num_kv_heads, block_size, head_dim)
    cache, scales = _poisoned(shape, cache_dtype or dtype, device), None
    sequence = torch.repeat_interleave(torch.arange(len(contexts)), contexts - first_seen)
    position = torch.cat([torch.arange(first, end) for first, end in zip(first_seen, contexts, strict=True)])
    seen_blocks = block_tables[sequence, position // block_size].long().to(device)
    slot = seen_blocks, 1, slice(None), slice(None), (position % block_size).to(device)
    # [keys that are seen, 2, num_kv_heads, head_dim]
    values = torch.randn(len(position), 2, num_kv_heads, head_dim, device=device)
    if cache_dtype is None:
        cache[slot] = values.to(dtype)
    else:
        scales = _poisoned(scale_shape(shape), torch.float32, device)
        codes, scales[slot] = quantize(values, cache_dtype)
        cache.view(torch.int8)[slot] = codes.view(torch.int8)

    # As in a model: the query is a slice of a wider row
    qkv = torch.randn(int(queries.sum()), num_kv_heads * group + 3, head_dim, device=device).to(dtype)
    return Batch(
        query=qkv[:, : num_kv_heads * group],
        key_cache=cache[:, 1, 0],
        value_cache=cache[:, 1, 1],
        block_tables=block_tables.to(device),
        query_starts=torch.cat([torch.zeros(1), queries.cumsum(0)]).int().to(device),
        context_lens=contexts.int().to(device),
        max_query_len=int(queries.max()),
        scale=head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        key_scales=None if scales is None else scales[:, 1, 0],
        value_scales=None if scales is None else scales[:, 1, 1],
        # From less than all scores together to more
        sinks=torch.linspace(-1.0, 6.0, num_kv_heads * group, device=device) if sinks else None,
    )


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype.itemsize == 1:
        poison = torch.full(shape, POISON_BYTES[0], dtype=torch.uint8, device=device)
        poison[::3] = POISON_BYTES[1]
        return poison.view(dtype)
    poison = torch.full(shape, float("nan"), dtype=dtype, device=device)
    poison[::3] = float("inf")
    return poison


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Relative error, by the norm of each token and head, below 1e-3 in float32 and 1e-2 in 16 bits."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert bool((error < (1e-3 if actual.dtype == torch.float32 else 1e-2)).all()), f"relative error {error.max()}"
