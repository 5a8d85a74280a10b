"""Sequences over a paged cache whose pages are scattered, and the same keys and values in one piece for the peers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire_kernels.decode_plan import DecodePlan
    from quire_kernels.prefill_tiles import PrefillTiles

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """The number of KV heads, of query heads for each, and their width."""

    num_kv_heads: int
    group: int
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group


LLAMA_8B = Heads(8, 4, 128)
GEMMA2_9B = Heads(8, 2, 256)
SMOLLM_135M = Heads(3, 3, 64)


@dataclass(frozen=True)
class PagedBatch:
    """`num_seqs` sequences alike: the newest `num_queries` tokens of each over a context of `context_len`."""

    heads: Heads
    num_seqs: int
    num_queries: int
    context_len: int
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor

    @classmethod
    def make(
        cls,
        heads: Heads,
        num_seqs: int,
        num_queries: int,
        context_len: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Self:
        """Random values; the cache is one layer's views of a cache of two."""
        num_pages = -(-context_len // BLOCK_SIZE)
        shape = (num_seqs * num_pages, 2, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
        cache = torch.randn(shape, dtype=dtype, device=device)
        num_tokens = num_seqs * num_queries
        return cls(
            heads=heads,
            num_seqs=num_seqs,
            num_queries=num_queries,
            context_len=context_len,
            query=torch.randn(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype, device=device),
            key_cache=cache[:, 1, 0],
            value_cache=cache[:, 1, 1],
            block_tables=torch.randperm(len(cache), device=device).int().view(num_seqs, num_pages),
            query_starts=torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32, device=device),
            context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32, device=device),
        )

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return float(self.heads.head_dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that the queries see."""
        tokens = self.num_seqs * self.context_len
        return 2 * tokens * self.heads.num_kv_heads * self.heads.head_dim * self.key_cache.element_size()

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over pairs of a query and a visible key."""
        before = self.context_len - self.num_queries
        pairs = self.num_queries * before + self.num_queries * (self.num_queries + 1) // 2
        return 4 * self.num_seqs * pairs * self.heads.num_heads * self.heads.head_dim

    def decode_plan(self, cache_dtype: torch.dtype | None = None) -> "DecodePlan":
        """Of a decode over these contexts; keys and values may be held in another data type."""
        # Here, so that a process that only lists the cases does not choose how kernels run
        from quire_kernels.decode_plan import DecodePlan, decode_splits

        heads, dtype = self.heads, self.query.dtype
        splits = decode_splits(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, cache_dtype or dtype, self.query.device
        )
        return DecodePlan.make(splits, self.context_lens.cpu().numpy(), self.query.device)

    def tiles(self) -> "PrefillTiles":
        """Of the queries in tiles, as a worker plans them."""
        from quire_kernels.prefill_tiles import PrefillTiles, queries_per_tile

        heads, dtype, device = self.heads, self.query.dtype, self.query.device
        queries = queries_per_tile(heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, dtype, device)
        sequences = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        return PrefillTiles.make(*sequences, len(self.query), queries, device)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_seqs, num_kv_heads, context_len, head_dim], copied from the pages into one piece."""
        return self._gather(self.key_cache), self._gather(self.value_cache)

    def plain_query(self) -> Tensor:
        """The queries [num_seqs, num_heads, num_queries, head_dim]."""
        shape = (self.num_seqs, self.num_queries, self.heads.num_heads, self.heads.head_dim)
        return self.query.view(shape).transpose(1, 2).contiguous()

    def flat(self, output: Tensor) -> Tensor:
        """An output of the form of `plain_query` in the form of `query`."""
        return output.transpose(1, 2).flatten(0, 1)

    def _gather(self, cache: Tensor) -> Tensor:
        pages = cache[self.block_tables.long()]  # [num_seqs, num_pages, num_kv_heads, BLOCK_SIZE, head_dim]
        return pages.transpose(1, 2).flatten(2, 3)[:, :, : self.context_len].contiguous()
